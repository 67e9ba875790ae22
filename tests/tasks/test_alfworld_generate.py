"""Generated ALFWorld games: reproducible, solvable, balanced, with separate splits, in files the reference can play."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.game import Game, load_game, parse_game
from agentgym.envs.alfworld.goal import TASK_TYPES
from agentgym.envs.alfworld.places import MAY_HOLD, PLACES_OF
from agentgym.envs.alfworld.textworld_backend import TextWorldEngine
from agentgym.errors import UsageError
from agentgym.registry import make_task_set
from agentgym.task import TaskSet, resolve_split
from agentgym.tasks.alfworld.draws import Draw
from agentgym.tasks.alfworld.generate import MAX_INDEX, GeneratedGame, generate
from agentgym.tasks.alfworld.rooms import KINDS, LIGHT, NOT_PICKABLE, ROOMS, SIZES, TEMPLATES, TWO
from agentgym.tasks.alfworld.scenes import coordinate, identifier
from agentgym.tasks.alfworld.wording import domain_text, grammar_text
from tests.envs.alfworld_data import game_files, game_ids, transcripts
from tests.shared_data import need

ROOT = Path(__file__).resolve().parents[2]

PRINT_DIGEST = """
import hashlib
from agentgym.tasks.alfworld.generate import generate
digest = hashlib.sha256()
for size in ("s", "l", "real"):
    for split in ("train", "valid_seen", "valid_unseen"):
        for index in (0, 7):
            game = generate(size, 5, index, split)
            for name, content in sorted(game.files().items()):
                digest.update(name.encode() + content)
print(digest.hexdigest())
"""


def parsed(game: GeneratedGame, grammar: str = "move") -> Game:
    files = game.files(grammar)
    return parse_game(files["game.tw-pddl"], files["traj_data.json"], name=game.name)


@pytest.mark.slow
def test_equal_arguments_give_equal_bytes_in_every_process():
    digests = set()
    for hash_seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1


def test_generated_bytes_change_only_with_the_version():
    digest = hashlib.sha256()
    for size in SIZES:
        game = generate(size, 0, 0, "train")
        for name, content in sorted(game.files().items()):
            digest.update(name.encode() + content)
    assert digest.hexdigest() == "6b6c5479fcac9c240934ad9d9b97a142d6f6e788d5cf6a247535c662c17ebf3d", (
        "bump GENERATOR_VERSION, then update this digest"
    )


def test_global_random_state_is_neither_used_nor_changed():
    generate.cache_clear()
    random.seed(1)
    before = random.getstate()
    first = generate("s", 0, 3).files()
    assert random.getstate() == before
    random.seed(2)
    generate.cache_clear()
    assert generate("s", 0, 3).files() == first


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_games_are_won_by_their_walkthrough_and_not_before(size):
    for index in range(200):
        game = generate(size, 1, index, "train")
        engine = Engine(parsed(game))
        engine.reset()
        assert engine.game.goal_reachable
        for command in game.walkthrough:
            assert not engine.won
            engine.step(command)
            assert engine.valid_last, (game.id, command)
        assert engine.won, game.id
        assert len(game.walkthrough) <= SIZES[size].step_cap // 2


@pytest.mark.parametrize("size", SIZES)
def test_games_have_the_size_they_promise(size):
    spec = SIZES[size]
    for index in range(40):
        game = generate(size, 2, index, "train")
        world = parsed(game)
        assert spec.receptacles[0] <= len(world.receptacle_names) <= spec.receptacles[1]
        things = [t for t in world.object_types if t not in {name.lower() for name in NOT_PICKABLE}]
        assert spec.objects[0] <= len(things) <= spec.objects[1]
        if size in ("xs", "s"):
            allowed = {name.lower() for names in spec.things.values() for name in names}
            assert set(things) <= allowed


@pytest.mark.parametrize("size", SIZES)
def test_kinds_are_balanced(size):
    kinds = SIZES[size].kinds
    blocks = 10
    counts = Counter(generate(size, 0, i, "valid_unseen").kind for i in range(blocks * len(kinds)))
    assert counts == dict.fromkeys(kinds, blocks)


def test_all_rooms_and_lifelike_traits_occur_in_real_games():
    games = [generate("real", 0, index) for index in range(120)]
    assert {game.scene.room for game in games} == set(ROOMS)
    worlds = [parsed(game) for game in games]
    assert any(any(len(here) > 1 for here in world.receptacles_at) for world in worlds), "shared locations"
    closed = [(w.receptacle_types[r], w.openable >> r & 1) for w in worlds for r in range(len(w.receptacle_names))]
    assert {("cabinet", 0), ("cabinet", 1), ("drawer", 0), ("drawer", 1)} <= set(closed)
    assert any(text.count(" a ") for world in worlds for text in world.holder_texts.values()), "things inside things"
    assert any(world.abilities.knives for world in worlds)
    assert any(world.abilities.sliceable for world in worlds)
    in_two = [sum(c >> o & 1 for c in w.initial.contents) for w in worlds for o in range(len(w.object_names))]
    assert max(in_two) == 2
    shown = {
        w.object_types[o] for w in worlds for c in w.initial.contents for o in range(len(w.object_names)) if c >> o & 1
    }
    assert {"houseplant", "television", "desklamp"} <= shown, "decoration that is seen but cannot be taken"
    assert "chair" not in shown
    assert all(f"{name}Type - otype" in games[0].problem for name in ("Apple", "Watch", "Chair"))


@pytest.mark.parametrize("size", ["xs", "s", "l", "real"])
def test_rooms_of_valid_unseen_look_like_no_other(size):
    layouts = {
        split: {generate(size, 0, index, split).scene.layout() for index in range(150)}
        for split in ("train", "valid_seen", "valid_unseen")
    }
    assert not layouts["valid_unseen"] & (layouts["train"] | layouts["valid_seen"])
    numbers = {s: {generate(size, 0, i, s).scene.number for i in range(150)} for s in ("train", "valid_unseen")}
    assert not numbers["train"] & numbers["valid_unseen"]
    assert len(layouts["valid_unseen"]) > 3


def test_no_validation_game_equals_a_train_game():
    def look(index: int, split: str) -> str:
        world = parsed(generate("xs", 0, index, split))
        engine = Engine(world)
        contents = [f"{name}: {engine.receptacle_contents(name)}" for name in world.receptacle_names]
        return " ".join([world.task_type, world.goal.object_type, world.goal.receptacle_type, *contents])

    train = {look(index, "train") for index in range(1500)}
    assert not train & {look(index, "valid_seen") for index in range(300)}
    assert not train & {look(index, "valid_unseen") for index in range(300)}


def test_task_sentences_follow_both_templates_and_depend_on_the_id_only():
    seen = Counter()
    for index in range(60):
        game = generate("real", 0, index)
        words = {"obj": game.thing.lower(), "recep": game.receptacle.lower(), "toggle": game.toggle.lower()}
        sentences = [template.format(**words) for template in TEMPLATES[game.kind]]
        assert game.task in sentences
        seen[sentences.index(game.task)] += 1
        world = parsed(game)
        assert world.task == game.task
        assert world.task_type == game.kind
        assert world.task_line == f"Your task is to: {game.task}."
    assert min(seen[0], seen[1]) > 15


def test_files_load_from_disk_as_an_official_folder(tmp_path):
    for index in range(12):
        game = generate("real", 0, index)
        folder = tmp_path / game.name
        folder.mkdir(parents=True)
        for name, content in game.files().items():
            (folder / name).write_bytes(content)
        world = load_game(folder)
        assert world.name == game.name
        assert world.solvable is True
        assert world.walkthrough == game.walkthrough
        data = json.loads((folder / "traj_data.json").read_text("utf-8"))
        assert data["pddl_params"]["object_target"] == game.thing
        assert data["pddl_params"]["parent_target"] == game.receptacle
        assert data["pddl_params"]["toggle_target"] == game.toggle
        assert data["scene"]["floor_plan"] == f"FloorPlan{game.scene.number}"
        assert (folder / "initial_state.pddl").read_text("utf-8") == game.problem
        assert game.name.startswith(f"{game.kind}-{game.thing}-None-{game.receptacle or game.toggle}-")


def test_the_old_wording_is_available():
    game = next(g for g in (generate("s", 0, i) for i in range(9)) if g.kind != LIGHT)
    world = parsed(game, "put")
    assert world.grammar == "put"
    engine = Engine(world)
    engine.reset()
    for command in world.walkthrough:
        engine.step(command)
    assert engine.won
    assert any(" in/on " in command for command in world.walkthrough)


def test_identifiers_follow_alfreds_scheme():
    assert coordinate(-1.5) == "_minus_01_dot_50"
    assert coordinate(0.0) == "_plus_00_dot_00"
    place = (1.23, 0.9, -2.0)
    assert identifier("Apple", place) == "Apple_bar__plus_01_dot_23_bar__plus_00_dot_90_bar__minus_02_dot_00"
    assert identifier("SinkBasin", place).startswith("Sink_bar__plus_01_dot_23")
    assert identifier("SinkBasin", place).endswith("_bar_SinkBasin")
    assert identifier("BathtubBasin", place).startswith("Bathtub_bar_")
    names = parsed(generate("s", 0, 0)).receptacle_names
    assert "sinkbasin 1" in names


def test_tables_are_consistent():
    assert set(KINDS) == set(TASK_TYPES)
    for room in ROOMS.values():
        assert {*room.always, *room.extra} <= set(MAY_HOLD)
        assert all(thing.lower() in PLACES_OF for thing in room.things), "everything can lie somewhere"
        assert not set(room.things) & NOT_PICKABLE
    assert [SIZES[name].step_cap for name in ("xs", "s", "m", "l4", "l", "xl", "real")] == [16, 20, 24, 30, 30, 40, 50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("huge", 0, 0), "Known: 'xs'"),
        (("s", 0, 0, "test"), "Known: 'train'"),
        (("s", 0, -1), "outside 0"),
        (("s", 0, MAX_INDEX + 1), "outside 0"),
    ],
)
def test_bad_calls_say_what_is_possible(arguments, message):
    with pytest.raises(UsageError, match=message):
        generate(*arguments)


def test_draws_are_fair_and_repeatable():
    draw = Draw("fair")
    counts = Counter(draw.weighted({"a": 1.0, "b": 3.0}) for _ in range(4000))
    assert 0.70 < counts["b"] / 4000 < 0.80
    assert Counter(draw.between(2, 4) for _ in range(300)).keys() == {2, 3, 4}
    assert sorted(draw.shuffled(range(50))) == list(range(50))
    assert [Draw("x", 1).unit() for _ in range(2)] == [Draw("x", 1).unit()] * 2
    assert Draw("x", 1).unit() != Draw("x", "1", "").unit()


class TestTaskSet:
    def test_the_set_answers_to_name_variant_and_options(self):
        tasks = make_task_set("alfworld/generated")
        assert isinstance(tasks, TaskSet)
        assert tasks.name == "alfworld/generated:real"
        small = make_task_set("alfworld/generated:s@4")
        assert small.name == "alfworld/generated:s@4"
        assert small.digest == make_task_set("alfworld/generated", size="s", seed=4).digest
        assert small.digest != make_task_set("alfworld/generated:s").digest
        assert resolve_split(small, "test") == "valid_unseen"
        assert resolve_split(small, "validation") == "valid_seen"

    def test_tasks_are_found_by_position_and_by_id(self):
        tasks = make_task_set("alfworld/generated:s")
        task = tasks.at("valid_seen", 12)
        assert task.id == "alfworld/generated/s/0/valid_seen/000012"
        assert tasks.get(task.id) == task
        assert task.kind in KINDS
        assert task.data["solution_length"] > 2
        for name, digest in task.files.items():
            assert hashlib.sha256(tasks.open(task, name)).hexdigest() == digest
        assert tasks.at("train", 3_000_000).id.endswith("/train/3000000")

    @pytest.mark.parametrize(
        "task_id",
        [
            "alfworld/generated/s/0/train/12",
            "alfworld/generated/s/0/train/0000012",
            "alfworld/generated/m/0/train/000012",
            "alfworld/generated/s/1/train/000012",
            "alfworld/generated/s/0/test/000012",
            "alfworld/generated/s/0/train/9999999999",
            "nonsense",
        ],
    )
    def test_unknown_ids_are_refused(self, task_id):
        with pytest.raises(UsageError, match="alfworld/generated"):
            make_task_set("alfworld/generated:s").get(task_id)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("alfworld/generated:huge", {}),
            ("alfworld/generated:s@x", {}),
            ("alfworld/generated:s", {"size": "m"}),
            ("alfworld/generated:s@1", {"seed": 2}),
            ("alfworld/generated", {"seed": -1}),
        ],
    )
    def test_bad_variants_and_options_are_refused(self, name, options):
        with pytest.raises(UsageError):
            make_task_set(name, **options)

    def test_an_unknown_file_is_refused(self):
        tasks = make_task_set("alfworld/generated:s")
        with pytest.raises(UsageError, match=r"game\.tw-pddl"):
            tasks.open(tasks.at("train", 0), "no.such")


@pytest.mark.slow
@pytest.mark.parametrize(("grammar", "size"), [("move", "l"), ("move", "real"), ("put", "l"), ("put", "real")])
def test_the_reference_plays_generated_games_like_the_native_engine(grammar, size):
    need("textworld")
    rng = random.Random(f"{grammar} {size}")
    reference = None
    for index in range(6 if size == "l" else 3):
        game = generate(size, 9, index, "valid_seen")
        files = game.files(grammar)
        if reference is None:
            reference = TextWorldEngine(files)
        else:
            reference.load(files)
        native = Engine(parsed(game, grammar))
        for commands in (native.game.walkthrough, [None] * 25):
            assert reference.reset() == native.reset()
            for planned in commands:
                assert reference.admissible() == native.admissible()
                command = planned or some_command(rng, native)
                assert reference.step(command) == native.step(command), command
                assert reference.won == native.won
    reference.close()


def some_command(rng: random.Random, engine: Engine) -> str:
    handling = [c for c in engine.admissible() if c.split()[0] not in ("go", "examine", "look", "inventory", "help")]
    if handling and rng.random() < 0.6:
        return rng.choice(handling)
    junk = ["GO TO fridge 1", " look ", "", "put apple 1 in/on fridge 1", "help", f"examine {engine.held}"]
    return rng.choice([*engine.admissible(), *junk])


@pytest.mark.slow
@pytest.mark.parametrize(("data_set", "grammar"), [("alfworld", "move"), ("alfworld_old", "put")])
def test_our_domain_and_grammar_give_the_recorded_texts_of_the_packaged_ones(data_set, grammar):
    """Scripted corner cases: shared locations, slicing, states, things in two places."""
    need("textworld")
    reference = None
    compared = 0
    chosen = set(game_ids(data_set)[:7])
    for record in transcripts(data_set):
        if record["kind"] not in ("scenario", "probe") or record["game"] not in chosen:
            continue
        files = dict(game_files(data_set, record["game"]))
        content = json.loads(files["game.tw-pddl"])
        content |= {"pddl_domain": domain_text(grammar), "grammar": grammar_text(record["task"], grammar)}
        files["game.tw-pddl"] = json.dumps(content).encode()
        if reference is None:
            reference = TextWorldEngine(files)
        else:
            reference.load(files)
        assert reference.reset() == record["reset"]["feedback"]
        for step in record["steps"]:
            assert reference.step(step["command"]) == step["feedback"], (record["game"], step["command"])
            assert list(reference.admissible()) == step["admissible_commands"]
            assert reference.won == step["won"]
            compared += 1
    assert reference is not None
    reference.close()
    assert compared > 150


def test_two_object_games_start_with_nothing_in_place():
    for index in range(60):
        game = generate("real", 3, index)
        if game.kind != TWO:
            continue
        engine = Engine(parsed(game))
        for name in engine.game.receptacle_names:
            if name.rsplit(" ", 1)[0] == game.receptacle.lower():
                there = {thing.rsplit(" ", 1)[0] for thing in engine.receptacle_contents(name)}
                assert game.thing.lower() not in there
