"""The native ALFWorld engine against the reference packages themselves, on freshly generated games."""

from __future__ import annotations

import gc
import os
import random
import re
import signal

import pytest

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.game import parse_game
from agentgym.envs.alfworld.goal import TASK_TYPES
from agentgym.envs.alfworld.textworld_backend import TextWorldEngine, planner, task_of
from agentgym.errors import DataError, InfrastructureError, UsageError
from tests.envs.alfworld_data import game_files, golden_game, transcripts
from tests.shared_data import need

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _packages():
    need("textworld")


def junk(rng, engine):
    """Something that an agent might say although it is not admissible."""
    command = rng.choice(engine.admissible())
    anything = rng.choice(list(engine.game.object_names))
    place = rng.choice(list(engine.game.receptacle_names))
    return rng.choice(
        [
            command.upper(),
            command.replace(" ", "  "),
            f"put {anything} in/on {place}",
            f"move {anything} to {place}",
            f"take {anything} from {place}",
            f"examine {anything}",
            f"open {place}",
            f"slice {anything} with {anything}",
            f"go to {place.split()[0]} 99",
            "",
            "\u200blook",
            "{o.name} [r] #look#",
            "x" * 500,
        ]
    )


def next_command(rng, engine, plan):
    """The walkthrough, oddly spaced and with failures between; then mostly what changes the state."""
    if plan and rng.random() < 0.7:
        return f" \t{plan.pop(0)}\u00a0\n"
    if plan or rng.random() < 0.15:
        command = junk(rng, engine)
        return "dance" if plan and command in engine.admissible() else command
    commands = engine.admissible()
    local = [command for command in commands if not command.startswith(("go to", "inventory", "help", "look"))]
    return rng.choice(local if local and rng.random() < 0.6 else commands)


def one_game_of_each_kind(size, grammar):
    from agentgym.tasks.alfworld.generate import generate

    missing = set(TASK_TYPES)
    for index in range(60):
        files = generate(size, seed=20261130, index=index, split="train").files(grammar)
        game = parse_game(files["game.tw-pddl"], files["traj_data.json"], name=f"{size}-{index}")
        if game.task_type in missing:
            missing.remove(game.task_type)
            yield files, game
    assert not missing


# 2,040 steps in all. Games of real size have the oddities (shared locations, an object in two receptacles, ..).
@pytest.mark.parametrize(("size", "grammar", "length"), [("l", "move", 220), ("real", "put", 120)])
def test_every_step_on_fresh_games_is_equal(size, grammar, length):
    rng = random.Random(7)
    reference = None
    inadmissible, games_won = 0, 0
    try:
        for files, game in one_game_of_each_kind(size, grammar):
            if reference is None:
                reference = TextWorldEngine(files)
            else:
                reference.load(files)
            engine = Engine(game)
            assert engine.grammar == grammar
            first = reference.reset()
            assert engine.reset() == first
            assert task_of(first) == game.task
            assert engine.admissible() == reference.admissible()
            plan, won = list(game.walkthrough), False
            if grammar == "put":
                plan = [re.sub(r"^move (.*) to ", r"put \1 in/on ", command) for command in plan]
            for number in range(length):
                command = next_command(rng, engine, plan)
                at = (game.name, number, command)
                assert engine.step(command) == reference.step(command), at
                assert engine.admissible() == reference.admissible(), at
                assert (engine.won, engine.valid_last) == (reference.won, reference.valid_last), at
                won |= engine.won
                inadmissible += not engine.valid_last
            games_won += won
    finally:
        if reference is not None:
            reference.close()
    assert inadmissible > 30
    assert games_won == len(TASK_TYPES)


def test_the_old_wording_is_equal_too():
    files, game = game_files("alfworld_old", "dev-042"), golden_game("alfworld_old", "dev-042")
    rng = random.Random(3)
    with TextWorldEngine(files) as reference:
        engine = Engine(game)
        assert engine.reset() == reference.reset()
        for _ in range(60):
            command = next_command(rng, engine, [])
            assert engine.step(command) == reference.step(command)
            assert engine.admissible() == reference.admissible()


def test_the_planner_finds_a_plan_that_wins_natively():
    game = golden_game("alfworld", "dev-019")
    plan = planner(game_files("alfworld", "dev-019"), time_limit=60)
    assert plan is not None
    engine = Engine(game)
    for command in plan:
        assert engine.step(command) != "Nothing happens."
    assert engine.won


def test_the_planner_gives_up_in_time_and_on_unreachable_goals():
    assert planner(game_files("alfworld", "dev-033"), time_limit=4) is None  # relaxed-reachable, impossible
    assert planner(game_files("alfworld", "dev-008"), time_limit=30) is None  # the reference raises


def test_the_package_expert_follows_its_recording():
    """Up to where it may draw a random command: its choices until then are its own."""
    recorded = next(e for e in transcripts("alfworld") if e["game"] == "dev-004" and e["kind"] == "expert")
    with TextWorldEngine(game_files("alfworld", "dev-004"), package_expert=True, seed=recorded["seed"]) as engine:
        engine.reset()
        assert engine.expert_command == recorded["reset"]["expert"]
        for step in recorded["steps"]:
            engine.step(step["command"])
            assert engine.expert_command == step["expert"]
        assert engine.won


def test_an_expert_that_raises_does_not_end_the_episode():
    failures = [
        (episode, number)
        for episode in transcripts("alfworld")
        for number, step in enumerate(episode.get("steps", ()))
        if step.get("expert_error") and number < 20
    ]
    episode, number = failures[0]
    with TextWorldEngine(game_files("alfworld", episode["game"]), package_expert=True) as engine:
        engine.reset()
        for step in episode["steps"][: number + 2]:
            assert engine.step(step["command"]) == step["feedback"]


def test_processes_end_with_their_engines():
    engine = TextWorldEngine(game_files("alfworld", "dev-006"))
    with pytest.raises(UsageError, match="reset first"):
        engine.step("look")
    process = engine.process_id
    os.kill(process, 0)
    del engine
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_dead_and_slow_processes_are_faults_of_the_world():
    files = game_files("alfworld", "dev-006")
    engine = TextWorldEngine(files)
    engine.reset()
    os.kill(engine.process_id, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="ended with code -9"):
        engine.step("look")
    with pytest.raises(UsageError, match="closed"):
        engine.step("look")
    with pytest.raises(InfrastructureError, match=r"no answer in 0\.01 s"):
        TextWorldEngine(files, load_timeout=0.01)


def test_games_that_the_reference_cannot_load_are_named():
    with pytest.raises(DataError, match=r"cannot load the game \(KeyError"):
        TextWorldEngine(game_files("alfworld", "dev-008"))


def test_shuffled_numbers_come_from_the_seed():
    files = game_files("alfworld", "dev-000")
    lists = []
    for seed in (1, 1, 2):
        with TextWorldEngine(files, shuffle=True, seed=seed) as engine:
            engine.reset()
            lists.append(engine.step("go to countertop 1") + engine.step("go to shelf 1"))
    assert lists[0] == lists[1] != lists[2]
