"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from agentgym.episode import Episode, RunConfig, TaskSetRecord, Turn, make_episode_id
from agentgym.metrics import Summary, compare, summarise
from agentgym.stats import pass_at_k, wilson


def config(tasks: int, repeats: int = 1) -> RunConfig:
    record = TaskSetRecord(name="t/set", version="1", digest="d" * 64)
    return RunConfig(
        env="t/T-v0", task_set=record, split="test", tasks=[f"t{i}" for i in range(tasks)], repeats=repeats
    )


def episode(task: int, outcome: str, *, turns: int = 2, repeat: int = 0, attempt: int = 0, kind: str = "a") -> Episode:
    fault = outcome == "fault"
    return Episode(
        episode_id=make_episode_id(f"t{task}", 0, repeat),
        task_id=f"t{task}",
        env="t/T-v0",
        seed=0,
        repeat=repeat,
        attempt=attempt,
        kind=kind,
        outcome=outcome,  # type: ignore[arg-type]
        cause="killed" if fault else "goal",
        total_reward=None if fault else float(outcome == "success"),
        score=None if fault else float(outcome == "success"),
        turns=[Turn(observation="o", completion="c", valid=i > 0) for i in range(turns)],
        usage={"agent": {"prompt_tokens": 10.0, "completion_tokens": 5.0, "cost": 0.5}},
    )


def test_faults_are_beside_the_rate_and_never_in_it() -> None:
    run = [episode(0, "success"), episode(1, "failure", turns=4), episode(2, "fault"), episode(3, "unknown")]
    overall = summarise(run, config(4)).overall
    assert (overall.episodes, overall.finished, overall.faults, overall.unknown, overall.solved) == (4, 3, 1, 1, 1)
    assert overall.success.value == 0.5
    assert (overall.success.low, overall.success.high) == pytest.approx(wilson(1, 2))
    assert overall.fault_causes == {"killed": 1}
    assert overall.turns == pytest.approx(8 / 3)
    assert overall.turns_solved == 2
    assert overall.invalid == pytest.approx(3 / 8)
    assert (overall.tokens, overall.cost, overall.tokens_per_solved) == (60.0, 2.0, 60.0)


def test_a_retried_fault_counts_once() -> None:
    overall = summarise([episode(0, "fault"), episode(0, "success", attempt=1)], config(1)).overall
    assert (overall.episodes, overall.faults, overall.retried, overall.success.value) == (1, 0, 1, 1.0)


def test_repeats_give_pass_at_k_and_an_interval_over_tasks() -> None:
    run = [
        episode(task, "success" if repeat < task else "failure", repeat=repeat)
        for task in range(4)
        for repeat in range(3)
    ]
    overall = summarise(run, config(4, 3)).overall
    assert overall.success.value == pytest.approx(6 / 12)
    assert overall.pass_at_k["2"] == pytest.approx(sum(pass_at_k(3, s, 2) for s in range(4)) / 4)
    assert overall.pass_at_k["3"] == pytest.approx(3 / 4)
    assert overall.pass_hat_k["3"] == pytest.approx(1 / 4)
    low, high = overall.success.low, overall.success.high
    assert low is not None
    assert high is not None
    assert low < wilson(6, 12)[0], "three episodes of one task say less than three of three tasks"


@pytest.mark.parametrize("run", [[], [episode(0, "fault")], [episode(0, "unknown")]])
def test_nothing_known_is_none_and_json(run: list[Episode]) -> None:
    summary = summarise(run, config(1))
    assert summary.overall.success.value is None
    text = msgspec.json.encode(summary)
    assert b"NaN" not in text
    assert msgspec.json.decode(text, type=Summary) == summary


def test_kinds_of_faults_before_reset_are_found_by_their_task() -> None:
    early = episode(0, "fault", kind="")
    summary = summarise([early, episode(0, "success", attempt=1, kind="b"), episode(1, "failure")], config(2))
    assert {kind: group.episodes for kind, group in summary.kinds.items()} == {"a": 1, "b": 1}
    assert summary.kinds["b"].retried == 1


def test_comparison_is_paired() -> None:
    first = [episode(i, "success" if i < 6 else "failure") for i in range(10)]
    second = [episode(i, "success" if 2 <= i < 9 else "failure") for i in range(9)] + [episode(9, "fault")]
    result = compare(first, second)
    assert (result.pairs, result.left_out, result.only_first, result.only_second) == (9, 1, 2, 3)
    assert result.difference.value == pytest.approx(1 / 9)
    assert result.p_value == pytest.approx(1.0)
    assert compare([], []).pairs == 0
    same = compare(first, first)
    assert same.difference.value == 0.0
    assert same.difference.low is not None
    assert math.isclose(same.difference.low, -(same.difference.high or 0.0))
