"""The contract of `AgentEnv`: tasks, splits, options, snapshots, and errors that say how to mend what is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.env import INFO_KEYS, AgentEnv, Outcome, cut_text, require_capabilities
from agentgym.errors import DataError, InfrastructureError, MissingExtraError, StepOrderError, UsageError, require_extra
from agentgym.spaces import Unicode, find_surrogate
from agentgym.task import ListTaskSet, Task, TaskSet, resolve_split, select_task
from tests.worlds import CountEnv


def _set(*splits: str) -> ListTaskSet:
    return ListTaskSet(
        "toy/set", [Task(id=f"{split}/{i}", family="toy", split=split) for split in splits for i in (0, 1)]
    )


# Spaces.


@given(st.text(max_size=40))
def test_every_unicode_text_that_fits_is_in_the_space(text: str) -> None:
    assert Unicode(40).contains(text)
    assert find_surrogate(text) == -1


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "x" * 41, b"bytes", None, 3])
def test_surrogates_long_texts_and_other_types_are_not_in_the_space(text: Any) -> None:
    assert not Unicode(40).contains(text)


def test_samples_are_in_the_space_and_depend_on_the_seed_alone() -> None:
    one, two = Unicode(20, seed=3), Unicode(20, seed=3)
    samples = [one.sample() for _ in range(200)]
    assert samples == [two.sample() for _ in range(200)]
    assert all(one.contains(sample) for sample in samples)
    assert len(set(samples)) > 100


def test_spaces_are_equal_by_their_length_and_survive_json() -> None:
    assert Unicode(5) == Unicode(5) != Unicode(6)
    assert Unicode(5).from_jsonable(Unicode(5).to_jsonable(["a", "\U0001f642"])) == ["a", "\U0001f642"]


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"max_length": -3}])
def test_a_space_without_room_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Unicode(**wrong)


@given(st.text(max_size=300), st.integers(1, 200))
def test_cut_texts_fit_and_keep_head_and_tail(text: str, limit: int) -> None:
    cut = cut_text(text, limit)
    assert len(cut) <= limit
    if len(text) <= limit:
        assert cut == text
    elif limit > 80:
        assert "left out" in cut
        assert cut[0] == text[0]
        assert cut[-1] == text[-1]


# Tasks and task sets.


def test_a_task_digest_depends_on_everything_in_it_and_on_nothing_else() -> None:
    task = Task(id="a", family="f", data={"x": 1, "y": 2}, files={"game": "00"})
    assert task.digest() == Task(id="a", family="f", data={"y": 2, "x": 1}, files={"game": "00"}).digest()
    for change in ({"kind": "k"}, {"split": "s"}, {"instruction": "i"}, {"data": {}}, {"files": {"game": "01"}}):
        assert msgspec.structs.replace(task, **change).digest() != task.digest()


def test_a_list_task_set_answers_by_position_id_and_file() -> None:
    tasks = [Task(id=name, family="f", split=split) for name, split in (("a", "train"), ("b", "test"), ("c", "train"))]
    tasks_set = ListTaskSet("f/set", tasks, files={"a": {"game": b"bytes"}})
    assert isinstance(tasks_set, TaskSet)
    assert dict(tasks_set.splits) == {"train": 2, "test": 1}
    assert tasks_set.at("train", 1).id == "c"
    assert tasks_set.get("b").split == "test"
    assert tasks_set.open(tasks[0], "game") == b"bytes"
    with pytest.raises(UsageError, match="no file 'gone'"):
        tasks_set.open(tasks[0], "gone")
    with pytest.raises(UsageError, match="Known: 'a', 'b', 'c'"):
        tasks_set.get("x")
    assert tasks_set.digest != ListTaskSet("f/set", tasks[:2]).digest


def test_equal_ids_in_a_task_set_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'a' occurs twice in f/set; ids must be unique"):
        ListTaskSet("f/set", [Task(id="a", family="f"), Task(id="a", family="f", kind="other")])


@pytest.mark.parametrize(
    ("given_name", "splits", "found"),
    [
        ("train", ("train", "test"), "train"),
        ("validation", ("train", "valid_seen", "valid_unseen"), "valid_seen"),
        ("test", ("train", "valid_seen", "valid_unseen"), "valid_unseen"),
        ("validation", ("dev", "test"), "dev"),
        ("valid_unseen", ("train", "valid_unseen"), "valid_unseen"),
    ],
)
def test_splits_answer_to_train_validation_and_test(given_name: str, splits: tuple[str, ...], found: str) -> None:
    assert resolve_split(_set(*splits), given_name) == found


def test_an_unknown_split_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown split of toy/set 'tran'. Did you mean 'train'\?"):
        resolve_split(_set("train", "test"), "tran")


@pytest.mark.parametrize("which", [2, -1, True, 1.0, None])
def test_a_position_outside_the_split_or_of_another_type_is_refused(which: Any) -> None:
    with pytest.raises(UsageError, match=r"outside split|named by its id"):
        select_task(_set("train"), "train", which)


def test_the_default_split_is_train_or_the_first_one() -> None:
    class AnySplit(CountEnv):
        def __init__(self, **options: Any) -> None:
            AgentEnv.__init__(self, **options)

    assert AnySplit(tasks=_set("test", "train")).split == "train"
    assert AnySplit(tasks=_set("dev", "test")).split == "dev"
    with pytest.raises(UsageError, match="holds no tasks"):
        AnySplit(tasks=ListTaskSet("empty", []))


# Options and the order of calls.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "count/taskz"}, "Did you mean 'count/tasks'"),
        ({"split": "nowhere"}, "Known: 'test'"),
        ({"max_turns": 0}, "whole number of at least 1"),
        ({"max_turns": 2.5}, "whole number of at least 1"),
        ({"max_observation": True}, "whole number of at least 1"),
        ({"action_format": "rawr"}, "Did you mean 'raw'"),
        ({"render_mode": "human"}, "Known: 'ansi'"),
        ({"tasks": Path("/nowhere/at/all")}, "name a task set instead"),
    ],
)
def test_wrong_options_are_refused_with_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CountEnv(**options)


def test_reset_plays_the_named_task_and_otherwise_draws_by_the_seed() -> None:
    env = CountEnv()
    for which in (7, "count/0007"):
        assert env.reset(seed=1, options={"task": which})[1]["task_id"] == "count/0007"
    drawn = [env.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert drawn == [env.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert len(set(drawn)) > 5


def test_a_task_given_by_id_may_be_of_another_split() -> None:
    env = CountEnv(tasks=_set("train", "test"), split="train")
    assert env.reset(seed=0, options={"task": "test/1"})[1]["split"] == "test"
    assert env.reset(seed=0, options={"split": "test", "task": 1})[1]["task_id"] == "test/1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tusk": 1}, "unknown reset option 'tusk'. Did you mean 'task'"),
        ({"task": 40}, "40 tasks \\(0 to 39\\)"),
        ({"task": "count/9999"}, "unknown task of count/tasks:40"),
        ({"split": "tests"}, "Did you mean 'test'"),
    ],
)
def test_wrong_reset_options_are_refused_with_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CountEnv().reset(seed=0, options=options)


def test_steps_out_of_order_say_which_call_is_missing() -> None:
    env = CountEnv(max_turns=1)
    with pytest.raises(StepOrderError, match=r"call reset\(\) before step\(\)"):
        env.step("up")
    with pytest.raises(StepOrderError, match=r"call reset\(\) before snapshot\(\)"):
        env.snapshot()
    env.reset(seed=0)
    env.step("up")
    with pytest.raises(gymnasium.error.ResetNeeded, match="the episode has ended; call reset"):
        env.step("up")


def test_after_an_exception_in_a_step_the_episode_is_over_until_reset() -> None:
    class Breaks(CountEnv):
        broken = True

        def _act(self, action: str) -> Outcome:
            if self.broken:
                raise InfrastructureError("the retriever is down")
            return super()._act(action)

    env = Breaks()
    env.reset(seed=0)
    saved = env.snapshot()
    with pytest.raises(InfrastructureError):
        env.step("up")
    env.broken = False
    for call in (lambda: env.step("up"), env.snapshot):
        with pytest.raises(StepOrderError, match=r"an exception ended the episode; call reset\(\)"):
            call()
    env.reset(seed=0)
    assert env.step("up")[1] == pytest.approx(1 / 3)
    env.broken = True
    with pytest.raises(InfrastructureError):
        env.step("up")
    env.broken = False
    env.restore(saved)
    assert env.step("up")[1] == pytest.approx(1 / 3)


def test_rewards_are_the_increments_of_the_score_and_the_last_turn_gives_a_verdict() -> None:
    env = CountEnv(max_turns=4)
    env.reset(seed=0)
    steps = [env.step(action) for action in ("up", "down", "nonsense", "up")]
    assert [reward for _, reward, *_ in steps] == pytest.approx([1 / 3, -1 / 3, 0, 1 / 3])
    assert [truncated for *_, truncated, _ in steps] == [False, False, False, True]
    assert [info["success"] for *_, info in steps] == [-1, -1, -1, 0]
    assert [info["valid"] for *_, info in steps] == [True, True, False, True]


def test_an_unknown_score_is_nan_and_gives_no_reward() -> None:
    class Unscored(CountEnv):
        def _start(self, task: Task) -> Outcome:
            return super()._start(task)._replace(score=None)

        def _act(self, action: str) -> Outcome:
            return super()._act(action)._replace(score=None)

    env = Unscored()
    _, info = env.reset(seed=0)
    assert math.isnan(info["score"])
    assert env.step("up")[1] == 0.0
    restored = Unscored()
    assert math.isnan(restored.restore(env.snapshot())[1]["score"])


def test_every_info_has_the_same_keys() -> None:
    env = CountEnv()
    infos = [env.reset(seed=0)[1], *(env.step(action)[-1] for action in ("up", "", "\ud800", "up", "up"))]
    assert all(tuple(info) == INFO_KEYS for info in infos)


@pytest.mark.parametrize(
    ("action", "said"),
    [("\ud800", "lone surrogate"), ("x" * 40_000, "at most 32768 characters"), (3, "a string, not int")],
)
def test_an_action_that_is_no_text_is_a_turn_and_not_an_exception(action: Any, said: str) -> None:
    env = CountEnv()
    env.reset(seed=0)
    observation, reward, _, _, info = env.step(action)
    assert said in observation
    assert (reward, info["valid"], info["turn"]) == (0.0, False, 1)


def test_long_observations_are_cut_and_say_so() -> None:
    class Talks(CountEnv):
        def _act(self, action: str) -> Outcome:
            return Outcome("start " + "x" * 5000 + " end")

    env = Talks(max_observation=200)
    env.reset(seed=0)
    observation = env.step("up")[0]
    assert len(observation) == 200
    assert observation.startswith("start")
    assert observation.endswith("end")
    assert "characters left out" in observation


# Snapshots.


def _saved() -> tuple[CountEnv, bytes]:
    env = CountEnv()
    env.reset(seed=4)
    env.step("up")
    return env, env.snapshot()


def test_a_snapshot_goes_on_in_a_fresh_environment_with_the_same_randomness() -> None:
    env, saved = _saved()
    fresh = CountEnv()
    observation, info = fresh.restore(saved)
    assert info["turn"] == 1
    assert "count is 1" in observation
    assert [env.step("up") for _ in range(2)] == [fresh.step("up") for _ in range(2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "take it again with this version"),
        ({"environment": "other-v3"}, "snapshot of other-v3"),
        ({"task_set": "count/tasks:7"}, "taken on task set 'count/tasks:7', this environment plays 'count/tasks:40'"),
        ({"task_id": "gone"}, "unknown task of count/tasks:40 'gone'"),
        ({"rng": {}}, "no usable generator state"),
        ({"rng": {"bit_generator": "PCG64", "state": {"state": {"int": "0xzz"}}}}, "no usable generator state"),
        ({"payload": b"\xc1"}, "no usable state of count-v0"),
        ({"payload": b""}, "no usable state of count-v0"),
        ({"info": {}}, "not a snapshot"),
        ({"turn": "one"}, "not a snapshot"),
    ],
)
def test_a_changed_snapshot_is_refused_with_what_is_wrong(change: dict[str, Any], message: str) -> None:
    _, saved = _saved()
    data = msgspec.msgpack.encode({**msgspec.msgpack.decode(saved), **change})
    env = CountEnv()
    with pytest.raises(UsageError, match=message):
        env.restore(data)
    with pytest.raises(StepOrderError):
        env.step("up")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_a_snapshot(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"pass what snapshot\(\) returned"):
        CountEnv().restore(data)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["up", "down", "odd"]), max_size=9), st.integers(0, 9))
def test_a_fork_at_any_turn_continues_as_the_original(actions: list[str], at: int) -> None:
    env, fork = CountEnv(), CountEnv()
    env.reset(seed=1)
    over = False
    for number, action in enumerate(actions):
        if number == at:
            fork.restore(env.snapshot())
        *_, terminated, _, info = step = env.step(action)
        if number >= at:
            assert fork.step(action) == step
        over = terminated or info["turn"] == env.max_turns
        if over:
            break


def test_an_environment_without_snapshots_says_so() -> None:
    class Plain(AgentEnv):
        family: ClassVar[str] = "plain"

        def _start(self, task: Task) -> Outcome:
            return Outcome("hello")

    env = Plain(tasks=_set("train"))
    env.reset(seed=0)
    with pytest.raises(UsageError, match="does not declare the capability 'snapshot'"):
        env.snapshot()
    with pytest.raises(UsageError, match=r"greedy needs snapshot, state_key, which plain does not offer"):
        require_capabilities(env, {"snapshot", "state_key"}, who="greedy")
    require_capabilities(CountEnv, {"snapshot", "state_key"}, who="greedy")


# Errors.


def test_errors_say_how_to_mend_what_is_wrong() -> None:
    error = DataError("games/x.json", "not JSON", "Fetch it again.")
    assert str(error) == "games/x.json: not JSON. Fetch it again."
    with pytest.raises(MissingExtraError, match=r"pip install 'agentgym-suite\[textworld\]'"):
        require_extra("no_such_module_at_all", extra="textworld")
    assert require_extra("json", extra="none").__name__ == "json"
