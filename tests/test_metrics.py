"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from agentgym.episode import Episode, RunConfig, TaskSetRecord, Turn, make_episode_id
from agentgym.metrics import NO_KIND, Estimate, Summary, compare, summarise, write_summary
from agentgym.stats import paired_difference, pass_at_k, wilson
from agentgym.view.table import compare_table, run_table


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


def changed(made: Episode, **changes: Any) -> Episode:
    return msgspec.structs.replace(made, **changes)


def printed(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(table)
    return out.getvalue()


def test_score_return_times_and_family_numbers_are_means() -> None:
    turns = [Turn(observation="", completion="", policy_seconds=s, env_seconds=s / 10) for s in (1.0, 3.0)]
    run = [
        changed(episode(0, "success"), turns=turns, metrics={"rooms": 2.0}),
        changed(episode(1, "failure", turns=0), score=0.5, total_reward=0.25, metrics={"rooms": 5.0}),
    ]
    overall = summarise(run, config(2)).overall
    assert (overall.score.value, overall.total_reward.value) == (0.75, 0.625)
    assert (overall.policy_seconds, overall.env_seconds) == pytest.approx((2.0, 0.2))
    assert overall.metrics == {"rooms": 3.5}


def test_spending_is_read_from_the_turns_where_the_episode_has_no_totals() -> None:
    turns = [Turn(observation="", completion="", usage={"prompt_tokens": 7.0, "cost": 0.25})] * 2
    overall = summarise([changed(episode(0, "failure"), usage={}, turns=turns)], config(1)).overall
    assert (overall.tokens, overall.cost, overall.tokens_per_solved) == (14, 0.5, None)


def test_a_fault_whose_kind_nobody_saw_is_shown_apart() -> None:
    kinds = summarise([episode(0, "fault", kind=""), episode(1, "success")], config(2)).kinds
    assert {kind: (group.episodes, group.faults) for kind, group in kinds.items()} == {NO_KIND: (1, 1), "a": (1, 0)}
    assert kinds[NO_KIND].success == Estimate()


def test_one_faulted_repeat_does_not_take_pass_at_k_away() -> None:
    outcomes = [("success", "success", "failure"), ("failure",) * 3, ("success", "success", "fault")]
    run = [episode(task, o, repeat=repeat) for task, seen in enumerate(outcomes) for repeat, o in enumerate(seen)]
    overall = summarise(run, config(3, 3)).overall
    assert overall.pass_at_k == pytest.approx({"1": (2 / 3 + 0 + 1) / 3, "2": (1 + 0 + 1) / 3, "3": (1 + 0) / 2})
    assert overall.pass_hat_k == pytest.approx({"1": (2 / 3 + 0 + 1) / 3, "2": (1 / 3 + 0 + 1) / 3, "3": 0.0})
    assert summarise(run[:1], config(1)).overall.pass_at_k == {}


@pytest.mark.parametrize("size", [1, 5, 30])
def test_repeats_that_all_agree_still_leave_an_interval(size: int) -> None:
    run = [episode(task, "success", repeat=repeat) for task in range(size) for repeat in range(3)]
    assert summarise(run, config(size, 3)).overall.success == Estimate(1.0, *wilson(size, size))
    difference = compare(run, run).difference
    assert (difference.low, difference.high) == tuple(paired_difference(0, 0, size))


def test_comparison_does_not_count_repeats_as_independent() -> None:
    """Five tasks, each better with all of 10 repeats: 2 of 2^5 sign patterns are as extreme, not 2 of 2^50."""
    first, second = (
        [episode(task, outcome, repeat=repeat) for task in range(5) for repeat in range(10)]
        for outcome in ("failure", "success")
    )
    found = compare(first, second)
    assert found.p_value == 2 / 2**5
    assert (found.only_first, found.only_second, found.difference.value) == (0, 50, 1.0)
    assert (found.difference.low, found.difference.high) == tuple(paired_difference(0, 5, 5))


def test_runs_that_share_nothing_compare_to_nothing() -> None:
    found = compare([episode(0, "success")], [episode(1, "success")])
    assert (found.pairs, found.left_out, found.p_value, found.difference) == (0, 2, None, Estimate())
    assert "-" in printed(compare_table(found, "one", "two"))


def test_nan_in_the_log_does_not_reach_the_summary_file(tmp_path: Path) -> None:
    bad = {"score": math.nan, "total_reward": math.inf, "metrics": {"rooms": math.nan, "lost": math.nan}}
    usage = {"agent": {"prompt_tokens": math.nan, "cost": math.inf}}
    run = [changed(episode(0, "success"), metrics={"rooms": 2.0}), changed(episode(1, "failure"), usage=usage, **bad)]
    summary = summarise(run, config(2))
    assert (summary.overall.score.value, summary.overall.total_reward.value) == (1.0, 1.0)
    assert (summary.overall.metrics, summary.overall.tokens, summary.overall.cost) == ({"rooms": 2.0}, 15.0, 0.5)
    write_summary(tmp_path, summary)
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary) == summary


def test_the_table_names_its_task_set_and_what_is_not_counted() -> None:
    run = [episode(0, "success"), episode(1, "failure", kind="b"), episode(2, "fault"), episode(3, "unknown")]
    text = printed(run_table(summarise(run, config(4)), config(4)))
    for part in ("t/T-v0", "t/set (dddddddd)", "50.0% [9, 91]", "killed 1", "without a verdict: 1"):
        assert part in text


def test_names_in_tables_are_neither_markup_nor_terminal_commands() -> None:
    name = "[red]x[/nothing]\x1b[31m"
    run = [changed(episode(0, "fault"), cause=name), episode(1, "success", kind=name)]
    named = msgspec.structs.replace(config(2), name=name)
    for text in (printed(run_table(summarise(run, named), named)), printed(compare_table(compare([], []), name, name))):
        assert "[red]x[/nothing]" in text
        assert "\x1b" not in text
