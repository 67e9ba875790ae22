"""Studies: plan, driver with a stand-in trainer, summaries, statistics against scipy and statsmodels, report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.formula.api as smf
import typer
from rich.console import Console
from typer.testing import CliRunner

from agentgym.baselines.study import command, pairs
from agentgym.baselines.study.analyse import analyse, headline, mean_over_steps
from agentgym.baselines.study.plan import PlannedRun, Study, check_settings, planned_runs, read_study, select
from agentgym.baselines.study.report import report_text, write_report
from agentgym.baselines.study.run import Tally, drive, read_failures
from agentgym.baselines.study.summary import (
    Curve,
    Final,
    RunSummary,
    Totals,
    code_digest,
    read_metrics,
    read_summary,
    summary_path,
    write_summary,
)
from agentgym.errors import DataError, UsageError

TRAINER = (sys.executable, str(Path(__file__).with_name("fake_trainer.py")))
Patch = pytest.MonkeyPatch
CONFIGS = Path(__file__).resolve().parents[2] / "baselines" / "configs"

TEXT = """
[study]
name = "small"
seeds = [0, 1]
max_env_steps = 100_000
[[study.cold_starts]]
name = "a"
model = "cold/a"
[[study.cold_starts]]
name = "b"
model = "cold/b"
seeds = [2]
[train]
env = "alfworld"
iterations = 6
evaluation = { every = 2 }
method_options = { group_size = 4 }
[[method]]
name = "grpo"
label = "GRPO"
[[method]]
name = "gigpo-mean"
label = "GiGPO | centred"
method = "gigpo"
options = { mode = "mean_norm" }
train = { optimiser = { lr = 1e-3 } }
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder with a study file and two cold starts, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "cold" / name).mkdir(parents=True)
        (tmp_path / "cold" / name / "model.safetensors").write_text(name)
    (tmp_path / "small.toml").write_text(TEXT)
    return tmp_path


def load(text: str = TEXT) -> tuple[Study, list[PlannedRun]]:
    path = Path("study.toml")
    path.write_text(text)
    study = read_study(path)
    return study, planned_runs(study)


def go(runs: list[PlannedRun], monkeypatch: Patch, *, parallel: int = 2, **how: Any) -> Tally:
    monkeypatch.setenv("FAKE_TRAINER", json.dumps(how))
    console = Console(stderr=True, force_terminal=False)
    return drive(
        runs, Path("out"), Path("res"), name="small", parallel=parallel, command=TRAINER, console=console, poll=0.02
    )


# Plan.


def test_each_method_runs_once_for_each_seed_of_each_cold_start(here: Path) -> None:
    study, runs = load()
    assert [run.id for run in runs] == [
        "grpo+a+0", "gigpo-mean+a+0", "grpo+a+1", "gigpo-mean+a+1", "grpo+b+2", "gigpo-mean+b+2",
    ]  # fmt: skip
    config = runs[-1].config
    assert config["method"] == "gigpo"
    assert config["method_options"] == {"group_size": 4, "mode": "mean_norm"}
    assert (config["model"], config["seed"], config["max_env_steps"]) == ("cold/b", 2, 100_000)
    assert config["optimiser"] == {"lr": 1e-3}
    assert "optimiser" not in runs[0].config
    assert len({run.digest for run in runs}) == len(runs)
    check_settings(runs)
    assert {run.method.name for run in select(runs, ["grpo"])} == {"grpo"}
    assert study.baseline == "grpo"


def test_only_names_of_the_study_are_taken(here: Path) -> None:
    _, runs = load()
    with pytest.raises(UsageError, match="gigpo-mean"):
        select(runs, ["gigpo-mena"])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name = "gigpo-mean"', 'name = "grpo"', "two methods"),
        ('name = "gigpo-mean"', 'name = "a/b"', "letters, digits"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seed 0 occurs twice"),
        ("seeds = [0, 1]", "", "no seeds"),
        ("iterations = 6", "", "needs iterations"),
        ("{ every = 2 }", "{ every = 9 }", "an evaluation before the last"),
        ("[train]", '[train]\nmodel = "x"', "gives model"),
        ("train = { optimiser", "train = { iterations = 9, optimiser", "changes iterations"),
        ("max_env_steps", "max_env_step", "no study file"),
        ('name = "small"', 'name = "small"\nbaseline = "x"', "no method of the study"),
    ],
)
def test_a_contradictory_study_file_is_refused(here: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [("mode =", "mood =", "gigpo-mean.*mood"), ("lr = 1e-3", "rate = 1e-3", "gigpo-mean.*rate")],
)
def test_settings_that_the_trainer_does_not_know_are_refused_beforehand(
    here: Path, old: str, new: str, problem: str
) -> None:
    _, runs = load(TEXT.replace(old, new))
    with pytest.raises(UsageError, match=problem):
        check_settings(runs)


def test_the_shipped_study_is_five_seeds_over_two_cold_starts_of_known_methods() -> None:
    study = read_study(CONFIGS / "study-s.toml")
    runs = planned_runs(study)
    check_settings(runs)
    assert len(runs) == 5 * len(study.method)
    assert [(s.name, s.seeds) for s in study.study.cold_starts] == [("s-a", (0, 1, 2)), ("s-b", (3, 4))]
    assert study.study.max_env_steps
    assert study.study.max_tokens


# Driver.


def test_runs_are_done_by_single_threads_and_summarised_and_skipped_the_next_time(
    here: Path, monkeypatch: Patch
) -> None:
    _, runs = load()
    tally = go(runs, monkeypatch)
    assert sorted(tally.finished) == sorted(run.id for run in runs)
    assert "threads 1, resume False" in Path("out/grpo+a+0.log").read_text()
    for run in runs:
        assert summary_path(Path("res"), run.id).stat().st_size < 6000
        summary = read_summary(Path("res"), run)
        assert summary is not None
        assert summary.curve.iteration == (0, 2, 4, 6)
        assert summary.curve.episodes == (256, 256, 256, 512)
        assert summary.greedy.episodes == 512
        assert summary.totals.env_steps == 9000
        assert summary.card.startswith("formulas follow")
        assert summary.code == code_digest()
    assert go(runs, monkeypatch) == Tally([], [], [], [])


def test_a_failed_run_stops_no_other_and_is_kept_until_it_succeeds(
    here: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, runs = load()
    tally = go(runs, monkeypatch, crash={"grpo+a+1": 3})
    assert tally.failed == ["grpo+a+1"]
    assert len(tally.finished) == len(runs) - 1
    assert "the loss is not a number" in capsys.readouterr().err
    (failure,) = read_failures(Path("res"))
    assert (failure.id, failure.exit_code, failure.iteration) == ("grpo+a+1", 3, 2)
    assert failure.reason == "the loss is not a number"
    assert go(runs, monkeypatch).finished == ["grpo+a+1"]
    assert "resume True, from 3" in Path("out/grpo+a+1.log").read_text()
    assert read_failures(Path("res")) == []


def test_a_sitting_starts_nothing_after_its_time(here: Path, monkeypatch: Patch) -> None:
    _, runs = load()
    monkeypatch.setenv("FAKE_TRAINER", "{}")
    quick = partial(drive, runs, Path("out"), Path("res"), name="small", command=TRAINER, poll=0.02)
    assert len(quick(parallel=2, sitting=0).left) == len(runs)
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"sleep": 0.05}))
    tally = quick(parallel=1, sitting=0.2 / 60)
    assert len(tally.finished) == 1  # what has begun is finished
    assert len(tally.left) == len(runs) - 1


_DRIVER = """
import sys
from pathlib import Path
from agentgym.baselines.study.plan import planned_runs, read_study
from agentgym.baselines.study.run import drive
runs = planned_runs(read_study(Path("study.toml")))
print(drive(runs, Path("out"), Path("res"), name="small", parallel=2, command=sys.argv[1:], poll=0.02))
"""


def start(**how: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "FAKE_TRAINER": json.dumps(how), "PYTHONPATH": str(CONFIGS.parents[1])}
    arguments = [sys.executable, "-c", _DRIVER, *TRAINER]
    return subprocess.Popen(
        arguments, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def wait_for(path: Path, lines: int) -> None:
    until = time.monotonic() + 30
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < until, f"{path} did not grow"
        time.sleep(0.02)


def test_ctrl_c_stops_the_runs_and_the_next_sitting_gives_the_same_summaries(here: Path, monkeypatch: Patch) -> None:
    _, runs = load()
    driver = start(sleep=0.1)
    wait_for(Path("out/grpo+a+0/metrics.jsonl"), 3)
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=30)
    assert driver.returncode != 0
    size = Path("out/grpo+a+0/metrics.jsonl").stat().st_size
    time.sleep(0.3)
    assert Path("out/grpo+a+0/metrics.jsonl").stat().st_size == size  # nothing goes on behind
    assert not summary_path(Path("res"), "grpo+a+0").exists()
    go(runs, monkeypatch)
    assert "resume True" in Path("out/grpo+a+0.log").read_text()
    broken = [summary_path(Path("res"), run.id).read_text() for run in runs]
    drive(runs, Path("out2"), Path("res2"), name="small", parallel=3, command=TRAINER, poll=0.02)
    assert broken == [summary_path(Path("res2"), run.id).read_text() for run in runs]


def test_runs_that_outlive_a_killed_driver_are_not_run_twice(here: Path, monkeypatch: Patch) -> None:
    _, runs = load()
    driver = start(sleep=0.3)
    wait_for(Path("out/grpo+a+0/metrics.jsonl"), 2)
    driver.kill()
    driver.communicate(timeout=30)
    tally = go(runs, monkeypatch)
    assert set(tally.busy) == {"grpo+a+0", "gigpo-mean+a+0"}
    assert len(tally.finished) == len(runs) - 2
    wait_for(Path("out/grpo+a+0/metrics.jsonl"), 11)
    wait_for(Path("out/gigpo-mean+a+0/metrics.jsonl"), 11)
    time.sleep(0.2)
    assert set(go(runs, monkeypatch).finished) == {"grpo+a+0", "gigpo-mean+a+0"}


def test_a_summary_of_other_settings_is_refused_and_says_which(here: Path, monkeypatch: Patch) -> None:
    _, runs = load()
    go(runs, monkeypatch)
    _, changed = load(TEXT.replace("lr = 1e-3", "lr = 2e-3"))
    with pytest.raises(DataError, match=r"other settings: optimiser\.lr was 0\.001 and is 0\.002"):
        go(changed, monkeypatch)
    Path("cold/b/model.safetensors").write_text("another")
    with pytest.raises(DataError, match="another model than the one that now lies in cold/b"):
        go(runs, monkeypatch)


def test_a_folder_begun_with_other_settings_is_not_continued(here: Path, monkeypatch: Patch) -> None:
    _, runs = load()
    go(runs, monkeypatch, crash={"gigpo-mean+a+0": 3})
    _, changed = load(TEXT.replace("iterations = 6", "iterations = 8"))
    for path in Path("res/runs").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="begun with other settings"):
        go(changed, monkeypatch)


def test_an_absent_cold_start_is_named_before_anything_runs(here: Path, monkeypatch: Patch) -> None:
    _, runs = load(TEXT.replace("cold/b", "cold/c"))
    with pytest.raises(DataError, match="cold/c: holds no model"):
        go(runs, monkeypatch)
    assert not Path("out").exists()


def test_a_trainer_that_ends_without_its_last_evaluation_has_failed(here: Path, monkeypatch: Patch) -> None:
    _, runs = load()
    tally = drive(runs[:1], Path("out"), Path("res"), name="small", parallel=1, command=("true",), poll=0.02)
    assert tally.failed == ["grpo+a+0"]
    assert read_failures(Path("res"))[0].exit_code == 0


def test_a_metrics_line_cut_off_by_a_kill_is_left_out_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train"}\n{"kind": "ev')
    assert read_metrics(path) == [{"kind": "train"}]
    path.write_text('{"kind": "ev\n{"kind": "train"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_metrics(path)


# Statistics.


def made(
    run: PlannedRun, success: list[float], *, steps: int = 1000, iterations: list[int] | None = None
) -> RunSummary:
    """A summary with a given curve at iterations 0, 2, 4, 6."""
    places = iterations or [0, 2, 4, 6]
    spent = tuple(steps * place for place in places)
    final = Final(success=success[-1], episodes=512, turns=9.0, invalid=0.2, outcome=0.7, entropy=0.2, tokens=60.0)
    return RunSummary(
        id=run.id, method=run.method.name, label=run.method.shown, card="formulas follow the official code or paper",
        seed=run.seed, cold_start=run.cold_start.name, model_digests=("",), code="c0de", settings=run.settings,
        settings_digest=run.digest, sampled=final, greedy=final, trained_entropy=None,
        curve=Curve(iteration=tuple(places), env_steps=spent, tokens=spent, seconds=spent, success=tuple(success),
                    episodes=(256,) * len(places)),
        totals=Totals(iterations=places[-1], env_steps=spent[-1], tokens=8 * spent[-1], scored_tokens=321),
    )  # fmt: skip


MANY = (
    TEXT.replace("seeds = [0, 1]", "seeds = [0, 1, 2]").replace("seeds = [2]", "seeds = [3, 4]")
    + '\n[[method]]\nname = "rloo"\n'
)
APART = {"grpo": 0.0, "gigpo-mean": 0.08, "rloo": 0.0}


def synthetic(
    effects: dict[str, float], noise: float, text: str = MANY
) -> tuple[Study, list[PlannedRun], list[RunSummary]]:
    study, runs = load(text)
    rng = np.random.default_rng(3)
    blocks = {(run.cold_start.name, run.seed): rng.normal(0, 0.05) for run in runs}
    found = []
    for run in runs:
        level = 0.6 + effects[run.method.name] + blocks[run.cold_start.name, run.seed] + rng.normal(0, noise)
        found.append(made(run, [0.35, level - 0.1, level, level + 0.1]))
    return study, runs, found


def test_the_headline_is_the_mean_of_the_scheduled_evaluations_after_the_start(here: Path) -> None:
    _, runs = load()
    assert headline(made(runs[0], [0.3, 0.4, 0.6, 0.8]), [2, 4, 6]) == pytest.approx(0.6)
    # A run that its budget ended after iteration 3 keeps the success it had then.
    ended = made(runs[0], [0.3, 0.4, 0.7], iterations=[0, 2, 3])
    assert headline(ended, [2, 4, 6]) == pytest.approx((0.4 + 0.7 + 0.7) / 3)
    assert mean_over_steps(made(runs[0], [0.3, 0.4, 0.6, 0.8]), 3000) == pytest.approx(
        (0.35 * 2000 + 0.45 * 1000) / 3000
    )


def test_known_differences_are_found_and_equal_methods_share_a_rank(here: Path) -> None:
    study, runs, found = synthetic(APART, noise=0.01)
    analysis = analyse(study, runs, found)
    assert {result.entry.name: result.rank for result in analysis.methods} == {"gigpo-mean": 1, "grpo": 2, "rloo": 2}
    assert analysis.methods[0].entry.name == "gigpo-mean"
    difference = analysis.methods[0].difference
    assert difference is not None
    assert difference.interval.low < 0.08 < difference.interval.high
    assert difference.p < 0.001
    assert difference.pairs == 5
    assert set(difference.by_start) == {"a", "b"}
    assert analysis.horizon == 6000


def test_pure_noise_is_told_apart_no_more_often_than_allowed(here: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = [("a", 0), ("a", 1), ("a", 2), ("b", 3), ("b", 4)]
    false = 0
    for _ in range(300):
        values = {name: {block: rng.normal() + 3 * block[1] for block in blocks} for name in "uvwxyz"}
        false += max(pairs.ranks(values).values()) > 1
    assert false / 300 < 0.09  # 5% plus three standard errors


def test_the_pooled_comparison_equals_a_regression_on_method_and_block() -> None:
    rng = np.random.default_rng(1)
    blocks = [("a", 0), ("a", 1), ("b", 2), ("b", 3)]
    values = {name: {block: float(rng.normal()) for block in blocks} for name in ("u", "v", "w")}
    del values["w"][("b", 3)]  # a run that failed
    rows = [{"y": y, "method": name, "block": str(block)} for name, runs in values.items() for block, y in runs.items()]
    reference = smf.ols("y ~ C(method) + C(block)", pd.DataFrame(rows)).fit()
    found = pairs.against(values, "u")
    raw = [pairs.raw_p(pairs.fit(values), "u", other) for other in ("v", "w")]
    for other, p in zip(("v", "w"), raw, strict=True):
        term = f"C(method)[T.{other}]"
        assert found[other].value == pytest.approx(reference.params[term])
        assert found[other].interval == pytest.approx(tuple(reference.conf_int().loc[term]))
        assert p == pytest.approx(reference.pvalues[term])


def test_of_two_methods_it_is_the_paired_t_test() -> None:
    first, second = [0.5, 0.6, 0.55, 0.7], [0.58, 0.61, 0.66, 0.72]
    blocks = [("a", seed) for seed in range(4)]
    values = {"u": dict(zip(blocks, first, strict=True)), "v": dict(zip(blocks, second, strict=True))}
    expected = scipy.stats.ttest_rel(second, first)
    found = pairs.against(values, "u")["v"]
    assert found.p == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert found.alone == pytest.approx(found.interval)


def test_what_no_block_connects_is_not_compared() -> None:
    values = {"u": {("a", 0): 0.1, ("a", 1): 0.2}, "v": {("b", 0): 0.9, ("b", 1): 0.8}}
    difference = pairs.against(values, "u")["v"]
    assert np.isnan(difference.value)
    assert np.isnan(difference.p)
    assert pairs.ranks(values) == {"u": 1, "v": 1}


# Report.


def test_the_report_has_the_numbers_the_budget_and_what_is_missing(here: Path) -> None:
    study, runs, found = synthetic(APART, noise=0.01)
    analysis = analyse(study, runs, [summary for summary in found if summary.id != "rloo+b+4"])
    path = write_report(Path("res"), analysis, [], command="agentgym study small.toml")
    text = path.read_text()
    assert "agentgym study small.toml" in text
    assert "100,000 environment steps" in text
    assert r"| 1 | GiGPO \| centred | follow the official code or paper | 5/5 |" in text
    assert "GiGPO | centred is shown to be better than every other method here" in text
    assert "fewer than 5 runs" in text
    assert "2 cold starts" in text
    assert "| 321 |" in text
    assert "- not run yet: 1" in text
    assert "+8" in text or "+7" in text
    for name in ("headline", "iterations", "env_steps"):
        tree = ElementTree.parse(f"res/{name}.svg")
        words = " ".join(tree.getroot().itertext())
        assert "GiGPO | centred" in words
        assert f"({name}.svg)" in text


def test_a_change_of_the_trainer_within_the_study_is_told(here: Path) -> None:
    study, runs, found = synthetic(APART, noise=0.01)
    assert "source changed" not in report_text(analyse(study, runs, found), [], command="x")
    found[0] = msgspec.structs.replace(found[0], code="other")
    assert "2 states" in report_text(analyse(study, runs, found), [], command="x")


def test_methods_that_are_not_told_apart_are_not_ranked_in_words(here: Path) -> None:
    study, runs, found = synthetic({"grpo": 0.0, "gigpo-mean": 0.005, "rloo": 0.0}, noise=0.05)
    text = report_text(analyse(study, runs, found), [], command="x")
    assert "is shown to be better" not in text
    assert "do not tell" in text


def test_one_run_a_method_says_nothing_about_differences(here: Path) -> None:
    study, runs, found = synthetic({"grpo": 0.0, "gigpo-mean": 0.3, "rloo": 0.0}, noise=0.0)
    first = [summary for summary in found if summary.seed == 0]
    analysis = analyse(study, runs, first)
    assert {result.rank for result in analysis.methods} == {1}
    text = report_text(analysis, [], command="x")
    assert "first impression" in text
    assert "nan" not in text


def test_a_study_without_any_run_has_a_report_too(here: Path) -> None:
    study, runs = load()
    text = write_report(Path("res"), analyse(study, runs, []), [], command="x").read_text()
    assert "- not run yet: 6" in text


@pytest.mark.parametrize("starts", [1, 2, 3])
def test_every_row_of_a_table_has_the_columns_of_its_head(here: Path, starts: int) -> None:
    more = '[[study.cold_starts]]\nname = "c"\nmodel = "cold/c"\nseeds = [5, 6]\n[train]'
    study, runs, found = synthetic(APART, noise=0.01, text=MANY.replace("[train]", more))
    text = report_text(analyse(study, runs, [s for s in found if s.cold_start in "abc"[:starts]]), [], command="x")
    tables = [block.replace(r"\|", "").splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert [len({line.count("|") for line in table}) for table in tables] == [1] * 4
    assert ("mean success, clustered" in text) == (starts == 3)


def test_the_report_says_what_its_mean_is_and_nothing_that_it_cannot_know(here: Path) -> None:
    text = report_text(analyse(*synthetic(APART, noise=0.01)), [], command="x")
    assert "tiny" not in text
    for said in ("after iteration 0, each with", "carried forward", "steps, whichever ends first.", "had to differ by"):
        assert said in text
    single = MANY.replace("max_env_steps = 100_000", "")
    text = report_text(analyse(*synthetic(APART, noise=0.0, text=single)), [], command="x")
    assert "The budget of a run is 6 iterations. " in text
    assert "had to differ" not in text
    assert "next to no noise" in text


def test_the_iterations_to_the_threshold_are_a_median(here: Path) -> None:
    study, runs = load()
    curves = {0: [0.3, 0.8, 0.8, 0.8], 1: [0.3, 0.4, 0.5, 0.8], 2: [0.3, 0.4, 0.5, 0.6]}
    found = [made(run, curves[run.seed]) for run in runs]
    assert "| 4 (2/3) |" in report_text(analyse(study, runs, found), [], command="x")


# Command.

app = typer.Typer()
app.command()(command.study)


def test_the_command_runs_reports_and_ends_with_one_after_a_failure(here: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(command, "drive", partial(drive, command=TRAINER, poll=0.02))
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"crash": {"grpo+a+0": 1}, "effect": {"gigpo": 0.1}}))
    ended = CliRunner().invoke(app, ["small.toml", "--only", "grpo"])
    assert ended.exit_code == 1, ended.output
    assert "failed: 1 (grpo+a+0)" in ended.output
    assert "failed after iteration 0" in Path("docs/results/small/README.md").read_text()
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"effect": {"gigpo": 0.1}}))
    ended = CliRunner().invoke(app, ["small.toml"])
    assert ended.exit_code == 0, ended.output
    text = Path("docs/results/small/README.md").read_text()
    assert "3/3" in text
    assert "without a result" not in text
    again = CliRunner().invoke(app, ["small.toml", "--report-only"])
    assert again.exit_code == 0
    assert Path("docs/results/small/README.md").read_text() == text
    assert tomllib.loads(Path("runs/study/small/grpo+b+2.toml").read_text())["seed"] == 2


def test_a_broken_off_study_has_its_report_and_the_command_that_continues_it(here: Path, monkeypatch: Patch) -> None:
    def broken_off(runs: list[PlannedRun], *arguments: Any, **options: Any) -> Tally:
        drive(runs[:1], *arguments, **options, command=TRAINER, poll=0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "drive", broken_off)
    folders = ["--out", "my runs", "--results", "res"]
    options = ["--parallel", "1", "--sitting", "2.5", "--only", "grpo", *folders]
    ended = CliRunner().invoke(app, ["small.toml", *options])
    assert ended.exit_code == 130, ended.output
    whole = "agentgym study small.toml --parallel 1 --sitting 2.5 --only grpo --out 'my runs' --results res\n"
    assert f"Stopped. Continue with: {whole}" in ended.output
    text = Path("res/small/README.md").read_text()
    assert "agentgym study small.toml --out 'my runs' --results res\n" in text
    assert "- not run yet: 5" in text
    monkeypatch.setattr(command, "drive", partial(drive, command=TRAINER, poll=0.02))
    ended = CliRunner().invoke(app, ["small.toml", "--sitting", "0", *folders])
    assert ended.exit_code == 0, ended.output
    assert "Continue with: agentgym study small.toml --sitting 0 --out 'my runs' --results res\n" in ended.output


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("success", [0.3, 0.4, 0.6], "unequal columns"),
        ("success", [0.3, 0.4, 0.6, 7.0], "outside of 0 to 1"),
        ("iteration", [0, 2, 2, 6], "do not increase"),
        ("env_steps", [0, 2, 1, 6], "decrease"),
        ("id", "grpo+a+1", r"that of 'grpo\+a\+1'"),
    ],
)
def test_a_damaged_summary_is_refused_by_name(here: Path, field: str, value: Any, problem: str) -> None:
    _, runs = load()
    path = write_summary(Path("res"), made(runs[0], [0.3, 0.4, 0.6, 0.8]))
    content = json.loads(path.read_text())
    (content if field == "id" else content["curve"])[field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"grpo\+a\+0\.json: .*{problem}.*Remove it"):
        read_summary(Path("res"), runs[0])


@pytest.mark.parametrize("content", [b'{"id": "grpo+a+0", "met', b"", b"\xff", b"[]"])
def test_a_torn_record_of_a_failure_is_refused_by_name(here: Path, content: bytes) -> None:
    path = Path("res/runs/grpo+a+0.failed.json")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"grpo\+a\+0\.failed\.json: is no record of a failed run.*Remove it"):
        read_failures(Path("res"))


def test_summaries_are_read_back_as_written(here: Path) -> None:
    _, runs = load()
    summary = made(runs[0], [0.3, 0.4, 0.6, 0.8])
    write_summary(Path("res"), summary)
    assert read_summary(Path("res"), runs[0]) == summary
    assert read_summary(Path("res"), runs[1]) is None
    summary_path(Path("res"), runs[0].id).write_text("{")
    with pytest.raises(DataError, match="no summary of a run"):
        read_summary(Path("res"), runs[0])
