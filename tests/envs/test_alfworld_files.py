"""Bad ALFWorld files end in DataError that names the file and the mending, never in another exception."""

from __future__ import annotations

import json
import random

import pytest

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.game import load_game, parse_game
from agentgym.errors import DataError
from tests.envs.alfworld_data import game_files, golden_game

GAME_ID = "dev-006"


def files():
    content = game_files("alfworld", GAME_ID)
    return content["game.tw-pddl"], content["traj_data.json"]


def parse(game, traj=None):
    return parse_game(game, traj, name="x", path="some/game.tw-pddl")


def edited(**changes):
    data = json.loads(files()[0]) | changes
    return {key: value for key, value in data.items() if value is not None}


def survives(game, traj=None):
    """Whether the content still is a game; anything but DataError propagates."""
    try:
        engine = Engine(parse(game, traj))
    except DataError as error:
        complaint = error
    else:
        complaint = None
    if complaint is not None:
        assert complaint.path.startswith("some/game.tw-pddl")
        assert complaint.problem
        assert complaint.mend.endswith(".")
        return False
    engine.reset()
    for command in engine.admissible():
        engine.fork().step(command)
    return True


def test_games_load_from_a_folder_or_a_file(tmp_path):
    folder = tmp_path / "valid" / "task" / "trial"
    folder.mkdir(parents=True)
    game, traj = files()
    (folder / "game.tw-pddl").write_bytes(game)
    assert load_game(folder).task_type == "pick_two_obj_and_place"
    (folder / "traj_data.json").write_bytes(traj)
    loaded = load_game(folder)
    assert loaded == load_game(folder / "game.tw-pddl")
    assert loaded.name == "task/trial"
    assert loaded.pddl_params["object_target"] == "CellPhone"
    assert load_game(folder, name="mine").name == "mine"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"game\.tw-pddl: the file cannot be read"):
        load_game(tmp_path)


def test_truncated_files():
    game, traj = files()
    assert survives(game, traj)
    assert not any(survives(game[:end], traj) for end in range(0, len(game) - 1, 397))
    assert not any(survives(game, traj[:end]) for end in range(len(traj) - 1))


def test_truncated_problems_inside_whole_files():
    data = json.loads(files()[0])
    problem = data["pddl_problem"].rstrip()
    assert not any(survives(data | {"pddl_problem": problem[:end]}) for end in range(0, len(problem), 61))


def test_truncated_grammars_and_domains_inside_whole_files():
    data = json.loads(files()[0])
    for key in ("grammar", "pddl_domain"):
        assert not any(survives(data | {key: data[key][:end]}) for end in range(0, len(data[key]) * 9 // 10, 499))


def test_flipped_bytes():
    game, traj = files()
    rng = random.Random(0)
    outcomes = set()
    for _ in range(600):
        damaged = bytearray(rng.choice([game, traj]))
        is_game = len(damaged) == len(game)
        for _ in range(rng.choice([1, 1, 3, 20])):
            damaged[rng.randrange(len(damaged))] = rng.choice([rng.randrange(256), *b'()"{}\\ ?-'])
        outcomes.add(survives(bytes(damaged), traj) if is_game else survives(game, bytes(damaged)))
    assert outcomes == {True, False}  # a letter changed in a comment does no harm


def test_problems_with_changed_words():
    data = json.loads(files()[0])
    words = data["pddl_problem"].split()
    rng = random.Random(1)
    outcomes = set()
    for _ in range(400):
        changed = words.copy()
        for _ in range(rng.choice([1, 2, 5])):
            at = rng.randrange(len(changed))
            changed[at : at + rng.randrange(3)] = rng.choices(words, k=rng.randrange(3))
        outcomes.add(survives(data | {"pddl_problem": " ".join(changed)}))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"[]", "not one JSON object"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b'{"pddl_domain": 1' + b"0" * 10_000 + b"}", "not JSON"),
        (b"{}", '"pddl_domain" is missing'),
        (edited(grammar=None), '"grammar" is missing'),
        (edited(pddl_problem=None), '"pddl_problem" is missing'),
        (edited(pddl_problem="\ud800"), "lone surrogate"),
        (edited(pddl_problem=""), "not one .define"),
        (edited(pddl_problem="(" * 1_000_000), "deeper than"),
        (edited(pddl_problem="(define (problem x) (:domain alfred))"), "no .:objects"),
        (edited(pddl_problem="(define (problem x) (:domain blocks) (:objects) (:init) (:goal))"), "not alfred"),
        (edited(pddl_domain="(define (domain alfred))"), "lacks the action look"),
        (edited(grammar="grammar :: nothing"), 'no "task" rule'),
        (edited(solvable="yes"), '"solvable" is neither'),
        (edited(walkthrough="look"), '"walkthrough" is not a list'),
        (edited(walkthrough=[1]), '"walkthrough" is not a list'),
    ],
)
def test_files_that_are_no_games(content, problem):
    with pytest.raises(DataError, match=problem):
        parse(content)


def with_problem(old, new):
    text = json.loads(files()[0])["pddl_problem"]
    assert old in text
    return edited(pddl_problem=text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("(:init", "(:init (openable Nowhere_bar_1)", "something undeclared"),
        ("(:init", "(:init (openable agent1)", "needs a receptacle"),
        ("(:init", "(:init (openable)", "should have 1 arguments"),
        ("(:init", "(:init (shiny agent1)", "unsupported fact"),
        ("(:init", "(:init (not (holdsAny agent1))", "unsupported fact"),
        ("(:init", "(:init (holdsAny agent1)", "one held object, not 0"),
        ("(:init", "(:init loose", "where a fact should be"),
        ("(atLocation", "(checked agent1) ; ", "one location of one agent, not 0"),
        ("- agent", "- robot", "unknown type 'robot'"),
        ("- agent", "- (either agent object)", "unknown type"),
        ("- agent", "- agent agent1 - object", "declared as agent and as object"),
        ("(:goal", "(:goal (and)) (:goal", "two :goal sections"),
        ("(not (= ?o1 ?o2))", "(not (inReceptacle ?o1 ?r))", "unsupported part"),
        ("(not (= ?o1 ?o2))", "(or (= ?o1 ?o2))", "unsupported part"),
        ("(not (= ?o1 ?o2))", "(isOn ?o1)", "none of the six kinds"),
        ("(not (= ?o1 ?o2))", "(isReceptacleObject)", "malformed atom"),
    ],
)
def test_problems_beyond_the_rules(old, new, problem):
    with pytest.raises(DataError, match=problem):
        parse(with_problem(old, new))


def test_a_receptacle_at_two_locations_is_left_to_the_reference():
    text = json.loads(files()[0])["pddl_problem"]
    start = text.index("(receptacleAtLocation ")
    receptacle = text[start:].split()[1]
    spare = with_problem("(:init", f"(:objects-end) (:init (receptacleAtLocation {receptacle} elsewhere_bar_1)")
    spare["pddl_problem"] = spare["pddl_problem"].replace("(:objects-end)", "")
    spare["pddl_problem"] = spare["pddl_problem"].replace("(:objects", "(:objects elsewhere_bar_1 - location")
    with pytest.raises(DataError, match=r'at two locations.*backend="textworld"'):
        parse(spare)


def test_an_unknown_wording_is_left_to_the_reference():
    grammar = json.loads(files()[0])["grammar"]
    for old, new in (
        ("You move the {o.name} to the", "You place the {o.name} at the"),
        ("You arrive at {r.name}", "You arrive at {lend.name}"),
        ("You close the", "You shut the"),
        ("Your task is to: ", "Task: "),
    ):
        with pytest.raises(DataError, match='backend="textworld"'):
            parse(edited(grammar=grammar.replace(old, new)))


@pytest.mark.parametrize(
    ("traj", "problem"),
    [
        ({}, '"task_type" is None'),
        ({"task_type": "pick_heat_then_place_in_recep", "pddl_params": {}}, "but the goal is pick_two"),
        ({"task_type": "pick_two_obj_and_place"}, '"pddl_params" is missing'),
        ({"task_type": "pick_two_obj_and_place", "pddl_params": {"object_target": 3}}, '"object_target"'),
        ({"task_type": ["pick_two_obj_and_place"], "pddl_params": {}}, '"task_type" is'),
    ],
)
def test_trajectory_files_that_do_not_fit(traj, problem):
    with pytest.raises(DataError, match=problem):
        parse(files()[0], traj)


def test_a_goal_about_sliced_objects_is_played():
    text = json.loads(game_files("alfworld", "dev-004")["game.tw-pddl"])["pddl_problem"]
    data = json.loads(game_files("alfworld", "dev-004")["game.tw-pddl"])
    data["pddl_problem"] = text.replace("(isHot ?o)", "(isHot ?o) (sliceable ?o) (isSliced ?o)")
    game = parse(data)
    assert game.goal.states == ("hot", "sliced")
    assert not game.goal_reachable  # plates cannot be sliced
    assert golden_game("alfworld", "dev-004").goal.states == ("hot",)
