"""Snapshots, forks and state keys of the native ALFWorld engine."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.envs.alfworld import state_codec
from agentgym.envs.alfworld.engine import Engine
from agentgym.errors import UsageError
from tests.envs.alfworld_data import golden_game

GAMES = ("dev-000", "dev-005", "dev-010", "dev-011", "dev-024", "dev-029", "dev-039")


def walk(engine, rng, steps):
    """Random admissible commands, rarely leaving where something can be handled; returns all that was observable."""
    seen = []
    for _ in range(steps):
        commands = engine.admissible()
        local = [command for command in commands if not command.startswith(("go to", "examine", "help", "inv"))]
        command = rng.choice(local if rng.random() < 0.6 else commands)
        seen.append((command, engine.step(command), engine.admissible(), engine.won, engine.state_key()))
    return seen


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GAMES), st.integers(0, 2**32), st.integers(0, 60), st.sampled_from(["file", "put"]))
def test_restored_and_forked_engines_continue_alike_and_independently(game_id, seed, steps, grammar):
    game = golden_game("alfworld", game_id)
    engine = Engine(game, grammar=grammar)
    walk(engine, random.Random(seed), steps)
    snapshot, key = engine.snapshot(), engine.state_key()
    views = (engine.here, engine.held, engine.visited, engine.found, engine.valid_last)
    fork, restored = engine.fork(), Engine(game, grammar=grammar)
    restored.restore(snapshot)
    assert (restored.here, restored.held, restored.visited, restored.found, restored.valid_last) == views
    expected = walk(engine, random.Random(seed + 1), 40)
    assert fork.snapshot() == restored.snapshot() == snapshot
    assert fork.state_key() == restored.state_key() == key
    assert walk(fork, random.Random(seed + 1), 40) == expected
    assert walk(restored, random.Random(seed + 1), 40) == expected


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GAMES), st.integers(0, 2**32))
def test_equal_state_keys_have_the_same_continuation(game_id, seed):
    """Many short walks in one corner of a game meet in equal states by different ways."""
    game = golden_game("alfworld", game_id)
    rng = random.Random(seed)
    by_key = {}
    engine = Engine(game)
    for _ in range(150):
        walk(engine, rng, 1)
        earlier = by_key.setdefault(engine.state_key(), engine.fork())
        assert walk(earlier.fork(), random.Random(seed), 15) == walk(engine.fork(), random.Random(seed), 15)


def test_taking_and_putting_back_returns_to_the_same_state():
    engine = Engine(golden_game("alfworld", "dev-000"))
    engine.step("go to shelf 2")
    before = engine.state_key()
    engine.step("take cup 2 from shelf 2")
    assert engine.held == "cup 2"
    assert engine.state_key() != before
    engine.step("move cup 2 to shelf 2")
    assert engine.state_key() == before


def test_the_way_an_object_took_does_not_matter_where_it_cannot_show():
    game = golden_game("alfworld", "dev-000")
    straight, detour = Engine(game), Engine(game)
    for command in ("go to shelf 2", "take cup 2 from shelf 2", "go to sinkbasin 1", "move cup 2 to sinkbasin 1"):
        assert straight.step(command) != "Nothing happens."
    for command in (
        "go to shelf 2",
        "take cup 2 from shelf 2",
        "go to diningtable 1",
        "move cup 2 to diningtable 1",
        "take cup 2 from diningtable 1",
        "go to sinkbasin 1",
        "move cup 2 to sinkbasin 1",
    ):
        assert detour.step(command) != "Nothing happens."
    assert straight.state_key() == detour.state_key()
    assert straight.visited != detour.visited


def test_the_way_matters_where_two_receptacles_share_a_location():
    """An object moved between them is listed "next to" both; one that came from elsewhere is not."""
    engine = Engine(golden_game("alfworld", "dev-000"))
    engine.step("go to countertop 1")
    assert engine.here == ("countertop 1", "shelf 1")
    engine.step("take cup 1 from countertop 1")
    engine.step("move cup 1 to shelf 1")
    assert engine.step("look") == "You are facing the countertop 1, and shelf 1. Next to it, you see a cup 1."
    key = engine.state_key()
    elsewhere = engine.fork()
    for command in ("take cup 1 from shelf 1", "move cup 1 to countertop 1", "take cup 1 from countertop 1"):
        elsewhere.step(command)
    elsewhere.step("move cup 1 to shelf 1")
    assert elsewhere.state_key() == key


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_snapshots_are_refused_and_change_nothing(data):
    engine = Engine(golden_game("alfworld", "dev-039"))
    walk(engine, random.Random(1), 30)
    snapshot = engine.snapshot()
    index = data.draw(st.integers(0, len(snapshot) - 1))
    flipped = bytearray(snapshot)
    flipped[index] ^= data.draw(st.integers(1, 255))
    for bad in (snapshot[:index], bytes(flipped), snapshot + b"\0", data.draw(st.binary(max_size=400))):
        with pytest.raises(UsageError):
            engine.restore(bad)
        assert engine.snapshot() == snapshot


def test_snapshots_with_a_right_checksum_and_impossible_values_are_refused():
    game = golden_game("alfworld", "dev-039")
    engine = Engine(game)
    position, tried = 0, 0
    for count, bound in state_codec.layout(game):
        values = [0] * sum(many for many, _ in state_codec.layout(game))
        values[position + count - 1] = bound
        position += count
        if bound.bit_length() % 8 != 1:  # fits in the bytes of its group
            tried += 1
            with pytest.raises(UsageError, match="impossible"):
                engine.restore(state_codec.encode(game, 0, values))
    assert tried >= 4


def test_snapshots_belong_to_one_game_one_wording_and_one_rule_set():
    game = golden_game("alfworld", "dev-000")
    snapshot = Engine(game).snapshot()
    for other in (
        Engine(golden_game("alfworld", "dev-001")),
        Engine(golden_game("alfworld_old", "dev-000")),
        Engine(game, grammar="put"),
        Engine(game, strict_appliances=True),
    ):
        with pytest.raises(UsageError):
            other.restore(snapshot)
        assert other.state_key() != Engine(game).state_key()


def test_snapshots_are_small_and_the_same_in_every_process():
    game = golden_game("alfworld", "dev-039")
    engine = Engine(game)
    for command in game.walkthrough[:3]:
        engine.step(command)
    assert len(engine.snapshot()) < 1000
    code = (
        "from tests.envs.alfworld_data import golden_game; from agentgym.envs.alfworld.engine import Engine\n"
        "game = golden_game('alfworld', 'dev-039'); engine = Engine(game)\n"
        "for command in game.walkthrough[:3]: engine.step(command)\n"
        "print(engine.snapshot().hex(), engine.state_key())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.split() == [engine.snapshot().hex(), engine.state_key()]
