"""The scripted ALFWorld expert (texts only) and the planner (shortest plans)."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.expert import Expert, TaskWords, read_task
from agentgym.envs.alfworld.game import Game, parse_game
from agentgym.envs.alfworld.planner import PlannerTimeoutError, breadth_first, plan
from agentgym.errors import UsageError
from agentgym.tasks.alfworld.generate import generate
from tests.envs.alfworld_data import DATA_SETS, game_ids, golden_game

PASSIVE = ("examine ", "look", "help", "inventory")


def game_of(size: str, seed: int, index: int, split: str = "valid_unseen") -> Game:
    game = generate(size, seed, index, split)
    return parse_game(game.game_data(), game.traj_data(), name=game.id)


def wander(engine: Engine, rng: np.random.Generator, turns: int, expert: Expert | None = None) -> None:
    """Somebody else acts, and prefers to handle things."""
    for _ in range(turns):
        commands = [command for command in engine.admissible() if not command.startswith(PASSIVE)]
        handling = [command for command in commands if not command.startswith("go ")]
        if handling and rng.random() < 0.6:
            commands = handling
        command = commands[int(rng.integers(len(commands)))]
        text = engine.step(command)
        if expert is not None:
            expert.observe(command, text, engine.admissible())


def follow(engine: Engine, expert: Expert, limit: int) -> int | None:
    """Number of turns to the win, None if there is none within the limit."""
    for turn in range(limit):
        if engine.won:
            return turn
        command = expert.next_action()
        assert command in engine.admissible(), command
        text = engine.step(command)
        expert.observe(command, text, engine.admissible())
    return limit if engine.won else None


def begin(game: Game, seed: int | None = 0, **options) -> tuple[Engine, Expert]:
    engine = Engine(game, **{key: options.pop(key) for key in ("grammar", "strict_appliances") if key in options})
    expert = Expert(rng=None if seed is None else np.random.default_rng(seed), **options)
    expert.reset(engine.reset(), engine.admissible())
    return engine, expert


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("put a mug in coffeemachine", TaskWords("simple", "mug", "coffeemachine")),
        ("put some soapbottle on toilet", TaskWords("simple", "soapbottle", "toilet")),
        ("look at cd under the desklamp", TaskWords("light", "cd", lamp="desklamp")),
        ("examine the book with the floorlamp", TaskWords("light", "book", lamp="floorlamp")),
        ("put a clean fork in drawer", TaskWords("clean", "fork", "drawer")),
        ("clean some cloth and put it in bathtubbasin", TaskWords("clean", "cloth", "bathtubbasin")),
        ("put a hot egg in garbagecan", TaskWords("heat", "egg", "garbagecan")),
        ("heat some potato and put it in sinkbasin", TaskWords("heat", "potato", "sinkbasin")),
        ("put a cool winebottle in shelf", TaskWords("cool", "winebottle", "shelf")),
        ("cool some pan and put it in stoveburner", TaskWords("cool", "pan", "stoveburner")),
        ("put two pillow in sofa", TaskWords("two", "pillow", "sofa")),
        ("find two keychain and put them in safe", TaskWords("two", "keychain", "safe")),
    ],
)
def test_task_sentences_are_understood(sentence, words):
    assert read_task(sentence) == words


def test_other_sentences_are_refused_only_when_an_action_is_asked_for():
    with pytest.raises(UsageError, match="template"):
        read_task("Put the warm apple next to the vase")
    expert = Expert()
    expert.reset("Your task is to: do as you like.", ["look"])
    expert.observe("look", "Nothing happens.", ["look"])
    with pytest.raises(UsageError, match="do as you like"):
        expert.next_action()
    with pytest.raises(UsageError, match="states no task"):
        Expert().reset("Welcome", ["look"])
    with pytest.raises(UsageError, match="reset"):
        Expert().next_action()
    with pytest.raises(UsageError, match="likely"):
        Expert(order="lucky")


@pytest.mark.slow
def test_the_expert_wins_real_games_within_fifty_turns():
    won: dict[str, list[bool]] = defaultdict(list)
    for index in range(300):
        game = game_of("real", 0, index)
        won[game.task_type].append(follow(*begin(game, index), 50) is not None)
    assert len(won) == 6
    for kind, results in won.items():
        assert sum(results) >= 0.99 * len(results), kind


@pytest.mark.parametrize("size", ["xs", "s", "m", "l4", "l", "xl"])
@pytest.mark.parametrize("order", ["likely", "random"])
def test_the_expert_wins_small_games_within_their_cap(size, order):
    results = []
    for index in range(40):
        game = game_of(size, 0, index)
        results.append(follow(*begin(game, index, order=order), 40) is not None)
    assert all(results)


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_the_expert_wins_every_solvable_recorded_game(data_set):
    """Both wordings, shared locations, starts at a receptacle, goals true at the start."""
    lost = []
    for game_id in game_ids(data_set):
        game = golden_game(data_set, game_id)
        turns = follow(*begin(game, 1), 50)
        if game.solvable:
            lost += [game_id] if turns is None else []
    assert lost == []


@pytest.mark.parametrize("grammar", ["move", "put"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_expert_recovers_from_what_others_did(grammar, strict):
    for index in range(60):
        rng = np.random.default_rng(index)
        engine, expert = begin(game_of("xl", 0, index), index, grammar=grammar, strict_appliances=strict)
        wander(engine, rng, 25, expert)
        assert follow(engine, expert, 60) is not None, index


def test_the_expert_is_not_thrown_off_by_a_helper_that_disagrees():
    """Every third turn somebody does something else."""
    for index in range(40):
        rng = np.random.default_rng(index)
        engine, expert = begin(game_of("l", 1, index), index)
        for _ in range(40):
            if engine.won or follow(engine, expert, 2) is not None:
                break
            wander(engine, rng, 1, expert)
        assert engine.won, index


def test_asking_changes_nothing_and_equal_seeds_agree():
    game = game_of("real", 0, 3)
    histories = []
    for _ in range(2):
        engine, expert = begin(game, 5)
        commands = []
        while not engine.won:
            command = expert.next_action()
            assert expert.next_action() == command
            commands.append(command)
            expert.observe(command, engine.step(command), engine.admissible())
        histories.append(commands)
    assert histories[0] == histories[1]
    orders = {tuple(begin(game, seed, order="random")[1].to_state()["order"]) for seed in range(5)}
    assert len(orders) == 5


def test_its_state_survives_json_at_every_turn():
    engine, expert = begin(game_of("real", 0, 4), 1)
    while not engine.won:
        copy = Expert.from_state(json.loads(json.dumps(expert.to_state())))
        assert copy.to_state() == expert.to_state()
        command = copy.next_action()
        assert command == expert.next_action()
        expert.observe(command, engine.step(command), engine.admissible())
    with pytest.raises(UsageError, match="no state"):
        Expert.from_state({"task": 3})


def test_a_goal_that_cannot_be_reached_leaves_it_busy_but_sane():
    for data_set in DATA_SETS:
        for game_id in game_ids(data_set):
            game = golden_game(data_set, game_id)
            if not game.solvable:
                engine, expert = begin(game, 0)
                assert follow(engine, expert, 120) is None


# -- planner --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [("xs", 120), ("s", 60), ("l", 4)])
def test_plans_are_as_short_as_exhaustive_search_finds(size, count):
    """From the start and from the middle of games that somebody else has begun."""
    for index in range(count):
        rng = np.random.default_rng(index)
        engine = Engine(game_of(size, 7, index), strict_appliances=bool(index % 2))
        wander(engine, rng, int(rng.integers(12)) if index % 3 else 0)
        fast, exact = plan(engine), breadth_first(engine)
        assert (fast is None) == (exact is None)
        if fast is not None and exact is not None:
            assert len(fast) == len(exact), (index, fast, exact)


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_plans_win_recorded_games_and_are_no_longer_than_the_reference_planners(data_set):
    for game_id in game_ids(data_set):
        game = golden_game(data_set, game_id)
        engine = Engine(game)
        key = engine.state_key()
        commands = plan(engine)
        assert engine.state_key() == key
        assert (commands is not None) == bool(game.solvable), game_id
        for command in commands or ():
            engine.step(command)
            assert engine.valid_last
        if commands is not None:
            assert engine.won
            assert len(commands) <= len(game.walkthrough) or not game.walkthrough


def test_plans_from_the_middle_of_real_games_win():
    for index in range(60):
        rng = np.random.default_rng(index)
        engine = Engine(game_of("real", 0, index), grammar="put" if index % 2 else "move")
        wander(engine, rng, 20)
        commands = plan(engine)
        assert commands is not None
        for command in commands:
            engine.step(command)
            assert engine.valid_last
        assert engine.won


def test_the_planner_keeps_its_time_limit():
    engine = Engine(game_of("real", 0, 0))
    with pytest.raises(PlannerTimeoutError, match="scripted expert"):
        plan(engine, time_limit=0.0)
    with pytest.raises(PlannerTimeoutError):
        breadth_first(engine, time_limit=0.05)


def test_a_goal_with_slices_is_planned_exhaustively():
    problem = """(define (problem p) (:domain alfred) (:objects agent1 - agent AppleType KnifeType - otype
        CounterTopType FridgeType - rtype Apple_bar_1 Knife_bar_1 - object CounterTop_bar_1 Fridge_bar_1 - receptacle
        loc1 loc2 loc3 - location)
        (:init (atLocation agent1 loc3) (receptacleType CounterTop_bar_1 CounterTopType) (receptacleType Fridge_bar_1
        FridgeType) (receptacleAtLocation CounterTop_bar_1 loc1) (receptacleAtLocation Fridge_bar_1 loc2)
        (openable Fridge_bar_1) (canContain FridgeType AppleType) (canContain CounterTopType KnifeType)
        (objectType Apple_bar_1 AppleType) (objectType Knife_bar_1 KnifeType) (pickupable Apple_bar_1)
        (pickupable Knife_bar_1) (sliceable Apple_bar_1) (inReceptacle Apple_bar_1 CounterTop_bar_1)
        (inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc1)
        (objectAtLocation Knife_bar_1 loc1))
        (:goal (and (exists (?r - receptacle) (exists (?o - object) (and (sliceable ?o) (isSliced ?o)
        (objectType ?o AppleType) (receptacleType ?r FridgeType) (inReceptacle ?o ?r)))))))"""
    data = generate("xs", 0, 0).game_data() | {"pddl_problem": problem}
    engine = Engine(parse_game(data, None, name="slices"))
    commands = plan(engine)
    assert commands == [
        "go to countertop 1",
        "take knife 1 from countertop 1",
        "slice apple 1 with knife 1",
        "move knife 1 to countertop 1",
        "take apple 1 from countertop 1",
        "go to fridge 1",
        "open fridge 1",
        "move apple 1 to fridge 1",
    ]
