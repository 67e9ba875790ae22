"""Options of the native ALFWorld engine, and rules that the recorded episodes reach rarely."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.game import parse_game
from agentgym.errors import UsageError
from tests.envs.alfworld_data import game_files, golden_game, transcripts

SHARED_GAMES = ("dev-000", "dev-004", "dev-011", "dev-024", "dev-037")


@pytest.mark.parametrize("game_id", SHARED_GAMES)
def test_a_new_game_plays_in_the_old_wording_as_the_old_reference_did(game_id):
    episodes = [e for e in transcripts("alfworld_old") if e["game"] == game_id and e["kind"] in ("random", "planner")]
    assert episodes
    for episode in episodes:
        engine = Engine(golden_game("alfworld", game_id), grammar="put")
        assert engine.reset() == episode["reset"]["feedback"]
        for step in episode["steps"]:
            assert engine.step(step["command"]) == step["feedback"]
            assert list(engine.admissible()) == step["admissible_commands"]


@pytest.mark.parametrize("game_id", SHARED_GAMES)
def test_an_old_game_plays_in_the_new_wording_as_the_new_reference_did(game_id):
    for episode in (e for e in transcripts("alfworld") if e["game"] == game_id and e["kind"] == "scenario"):
        engine = Engine(golden_game("alfworld_old", game_id), grammar="move")
        assert engine.reset() == episode["reset"]["feedback"]
        for step in episode["steps"]:
            assert engine.step(step["command"]) == step["feedback"]
            assert list(engine.admissible()) == step["admissible_commands"]


def test_strict_appliances_must_be_open():
    game = golden_game("alfworld", "dev-004")
    lenient, strict = Engine(game), Engine(game, strict_appliances=True)
    for engine in (lenient, strict):
        for command in game.walkthrough[:3]:
            engine.step(command)
    assert lenient.step("heat plate 6 with microwave 1") == "You heat the plate 6 using the microwave 1."
    assert strict.step("heat plate 6 with microwave 1") == "Nothing happens."
    strict.step("open microwave 1")
    assert strict.step("heat plate 6 with microwave 1") == "You heat the plate 6 using the microwave 1."
    assert strict.object_states("plate 6") == {"hot"}


def test_shuffled_numbers_change_names_within_classes_only():
    files = game_files("alfworld", "dev-000")
    plain = golden_game("alfworld", "dev-000")

    def shuffled(seed):
        generator = np.random.default_rng(seed)
        return parse_game(files["game.tw-pddl"], files["traj_data.json"], name="x", shuffle=generator)

    game = shuffled(3)
    assert game.object_names != plain.object_names
    assert sorted(game.object_names) == sorted(plain.object_names)
    assert [n.split()[0] for n in game.object_names] == [n.split()[0] for n in plain.object_names]
    assert shuffled(3).object_names == game.object_names
    assert game.digest != plain.digest


def test_an_unknown_grammar_option_is_named():
    with pytest.raises(UsageError, match="'put'"):
        Engine(golden_game("alfworld", "dev-000"), grammar="new")


def test_the_views_name_what_is_there():
    engine = Engine(golden_game("alfworld", "dev-000"))
    assert engine.here == ()
    assert engine.found == ()
    engine.step("go to shelf 2")
    assert engine.here == ("shelf 2",)
    assert engine.visited == ("shelf 2",)
    assert engine.found == engine.receptacle_contents("shelf 2")
    assert engine.is_open("shelf 2")
    assert not engine.is_openable("shelf 2")
    assert engine.is_openable("fridge 1")
    assert not engine.is_open("fridge 1")
    with pytest.raises(UsageError, match="fridge 1"):
        engine.is_open("fridge 11")
    with pytest.raises(UsageError):
        engine.object_states("fridge 1")


def edited(problem_edit, *, data_set="alfworld", game_id="dev-000", traj=True):
    files = game_files(data_set, game_id)
    data = json.loads(files["game.tw-pddl"])
    data["pddl_problem"] = problem_edit(data["pddl_problem"])
    return parse_game(data, files["traj_data.json"] if traj else None, name="edited")


def test_comments_case_and_costs_do_not_matter():
    game = edited(lambda text: "; made by hand\n" + text.upper().replace("(:INIT", "(:init (= (total-cost) 0)"))
    assert game.object_names == golden_game("alfworld", "dev-000").object_names


def test_an_object_may_be_held_at_the_start():
    plate = "Plate_bar__plus_99_bar_1"

    def hold(text):
        return text.replace("(:objects", f"(:objects {plate} - object").replace(
            "(:init", f"(:init (holds agent1 {plate}) (holdsAny agent1) (objectType {plate} PlateType)"
        )

    engine = Engine(edited(hold))
    assert engine.step("inventory").startswith("You are carrying: a plate ")
    assert not any(command.startswith("take") for command in engine.admissible())


def test_the_task_type_follows_from_the_goal_without_a_trajectory_file():
    game = edited(lambda text: text, traj=False)
    assert game.task_type == "pick_cool_then_place_in_recep"
    assert game.pddl_params == {"object_target": "plate", "parent_target": "sinkbasin", "toggle_target": ""}


def test_an_old_game_in_the_new_wording_has_the_help_of_new_games():
    engine = Engine(golden_game("alfworld_old", "dev-000"), grammar="move")
    assert engine.step("help") == golden_game("alfworld", "dev-000").help_text
    assert Engine(golden_game("alfworld", "dev-000"), grammar="put").step("help") == "Nothing happens."
