"""The native ALFWorld engine says what the reference said, byte for byte, in every recorded episode."""

from __future__ import annotations

import pytest

from agentgym.envs.alfworld.engine import Engine
from tests.envs.alfworld_data import DATA_SETS, game_ids, golden_game, transcripts


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_every_recorded_step_is_reproduced(data_set):
    steps = 0
    for episode in transcripts(data_set):
        if episode["kind"] == "engine_error":
            continue
        engine = Engine(golden_game(data_set, episode["game"]))
        where = (episode["game"], episode["kind"])
        first = episode["reset"]
        assert engine.reset() == first["feedback"], where
        assert list(engine.admissible()) == first["admissible_commands"], where
        assert engine.won == first["won"], where
        for number, step in enumerate(episode["steps"]):
            was_admissible = step["command"].strip() in engine.admissible()
            feedback = engine.step(step["command"])
            at = (*where, number, step["command"])
            assert feedback == step["feedback"], at
            assert list(engine.admissible()) == step["admissible_commands"], at
            assert engine.won == step["won"] == step["done"] == bool(step["score"]), at
            assert engine.valid_last == was_admissible == (feedback != "Nothing happens."), at
            steps += 1
    assert steps > 2000


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_games_the_reference_cannot_load_have_an_unreachable_goal(data_set):
    refused = {episode["game"] for episode in transcripts(data_set) if episode["kind"] == "engine_error"}
    assert refused
    assert {game for game in game_ids(data_set) if not golden_game(data_set, game).goal_reachable} == refused


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_the_game_knows_its_task_and_wording(data_set):
    for episode in transcripts(data_set):
        game = golden_game(data_set, episode["game"])
        assert game.task == episode["task"]
        assert game.grammar == {"alfworld": "move", "alfworld_old": "put"}[data_set]


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_the_walkthrough_wins(data_set):
    won = 0
    for game_id in game_ids(data_set):
        game = golden_game(data_set, game_id)
        engine = Engine(game)
        engine.reset()
        for command in game.walkthrough:
            engine.step(command)
        won += engine.won
        assert engine.won or not game.walkthrough
    assert won > 10
