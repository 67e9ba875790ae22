"""Numbers of a study from the summaries of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentgym.baselines.study.pairs import Additive, Block, Difference, Values, against, fit, ranks, visible
from agentgym.baselines.study.plan import MethodEntry, PlannedRun, Study
from agentgym.baselines.study.summary import RunSummary
from agentgym.stats import NAN_INTERVAL, Interval, bootstrap_mean

_GRID = 24  # steps of a curve by environment steps


class Spread(NamedTuple):
    """A mean over runs.

    Attributes:
        mean: nan without runs.
        interval: 95% interval over the runs: what further seeds from these cold starts would give.
        clustered: the same clustered by cold start: what other cold starts would give; wide with few of them.
        n: runs.
    """

    mean: float
    interval: Interval
    clustered: Interval
    n: int


class Point(NamedTuple):
    """A point of a mean curve with its 95% interval over runs."""

    x: float
    mean: float
    interval: Interval


class MethodResult(NamedTuple):
    """What came out for a method.

    Attributes:
        entry: of the study file.
        card: where its formulas come from.
        runs: summaries.
        planned: number of runs that the study wants.
        rank: see `agentgym.baselines.study.pairs.ranks`; 0 without runs.
        headline: mean held-out success over the evaluations after the start.
        by_steps: mean held-out success over the environment steps that all runs have.
        difference: of the headline from the baseline's; None for the baseline itself.
        gain: final sampled success over that of the cold start.
        reached: iteration of the first evaluation at the threshold, one a run; None where it was not reached.
    """

    entry: MethodEntry
    card: str
    runs: tuple[RunSummary, ...]
    planned: int
    rank: int
    headline: Spread
    by_steps: Spread
    difference: Difference | None
    gain: Spread
    reached: tuple[int | None, ...]

    def over(self, value: Callable[[RunSummary], float | None]) -> Spread:
        """Mean of a number of each run; runs that lack it are left out."""
        return spread([(run, known) for run in self.runs if (known := value(run)) is not None])


class Analysis(NamedTuple):
    """What came out of a study.

    Attributes:
        study: the study file.
        methods: best headline first, those without runs last.
        horizon: environment steps that all runs have.
        model: the fit of the headline.
        visible: smallest difference that the pairwise comparison could show.
        missing: ids of runs without a summary.
    """

    study: Study
    methods: tuple[MethodResult, ...]
    horizon: int
    model: Additive
    visible: float
    missing: tuple[str, ...]


def schedule(study: Study) -> list[int]:
    """Iterations at which a run is evaluated after the start."""
    every, last = int(study.train["evaluation"]["every"]), int(study.train["iterations"])
    return [*range(every, last, every), last]


def headline(run: RunSummary, iterations: Sequence[int]) -> float:
    """Mean held-out success over the scheduled evaluations: the area under the learning curve.

    Where the budget ended a run before, the policy it had then stands for the rest.
    """
    return float(np.mean([held(run, iteration) for iteration in iterations]))


def held(run: RunSummary, iteration: int) -> float:
    """Held-out success at an iteration: of the last evaluation up to it."""
    return max(zip(run.curve.iteration, run.curve.success, strict=True), key=lambda p: (p[0] <= iteration, p[0]))[1]


def mean_over_steps(run: RunSummary, horizon: float) -> float:
    """Mean of held-out success over the first `horizon` environment steps, straight lines between evaluations."""
    steps, success = np.array(run.curve.env_steps, dtype=float), np.array(run.curve.success)
    if horizon <= 0:
        return float(success[0])
    inside = steps < horizon
    x = np.append(steps[inside], horizon)
    y = np.append(success[inside], np.interp(horizon, steps, success))
    return float(np.sum((y[1:] + y[:-1]) / 2 * np.diff(x)) / horizon)


def spread(values: Sequence[tuple[RunSummary, float]]) -> Spread:
    """Mean over runs with both intervals."""
    numbers = [value for _, value in values]
    if not numbers:
        nothing = Interval(*NAN_INTERVAL)
        return Spread(math.nan, nothing, nothing, 0)
    starts = [run.cold_start for run, _ in values]
    return Spread(float(np.mean(numbers)), bootstrap_mean(numbers), bootstrap_mean(numbers, starts), len(numbers))


def by_iteration(runs: Sequence[RunSummary], study: Study) -> list[Point]:
    """Mean curve of held-out success over the iterations."""
    places = [0, *schedule(study)]
    return [_point(x, [held(run, x) for run in runs]) for x in places] if runs else []


def by_env_steps(runs: Sequence[RunSummary]) -> list[Point]:
    """Mean curve of held-out success over environment steps, as far as all of these runs go."""
    end = min((run.curve.env_steps[-1] for run in runs), default=0)
    places = [end * step / _GRID for step in range(_GRID + 1)] if end else []
    return [_point(x, [float(np.interp(x, r.curve.env_steps, r.curve.success)) for r in runs]) for x in places]


def _point(x: float, values: Sequence[float]) -> Point:
    return Point(float(x), float(np.mean(values)), bootstrap_mean(values))


def analyse(study: Study, runs: Sequence[PlannedRun], summaries: Sequence[RunSummary]) -> Analysis:
    """Compares the methods on the runs that there are.

    Args:
        study: the study file.
        runs: as planned.
        summaries: of the finished ones.
    """
    done = {run.id: run for run in summaries}
    per_method: dict[str, list[RunSummary]] = {entry.name: [] for entry in study.method}
    for planned in runs:
        if planned.id in done:
            per_method[planned.method.name].append(done[planned.id])
    iterations = schedule(study)
    horizon = min((run.curve.env_steps[-1] for run in summaries), default=0)
    values: dict[str, dict[Block, float]] = {
        name: {(run.cold_start, run.seed): headline(run, iterations) for run in found}
        for name, found in per_method.items()
        if found
    }
    model = fit(values)
    rank = ranks(values, model)
    differences = against(values, study.baseline, model) if study.baseline in values else {}
    results = [
        _result(
            entry,
            per_method[entry.name],
            values,
            planned=sum(run.method.name == entry.name for run in runs),
            rank=rank.get(entry.name, 0),
            difference=differences.get(entry.name),
            horizon=horizon,
            threshold=study.study.threshold,
        )
        for entry in study.method
    ]
    results.sort(key=lambda result: -result.headline.mean if result.runs else math.inf)
    least = min((len(found) for found in per_method.values() if found), default=0)
    pairs = len(values) * (len(values) - 1) // 2
    missing = tuple(run.id for run in runs if run.id not in done)
    return Analysis(study, tuple(results), horizon, model, visible(model, least, pairs), missing)


def _result(
    entry: MethodEntry,
    runs: Sequence[RunSummary],
    values: Values,
    *,
    planned: int,
    rank: int,
    difference: Difference | None,
    horizon: int,
    threshold: float,
) -> MethodResult:
    own: Mapping[Block, float] = values.get(entry.name, {})
    reached = [
        next((i for i, s in zip(run.curve.iteration, run.curve.success, strict=True) if s >= threshold), None)
        for run in runs
    ]
    return MethodResult(
        entry=entry,
        card=runs[0].card if runs else "",
        runs=tuple(runs),
        planned=planned,
        rank=rank,
        headline=spread([(run, own[run.cold_start, run.seed]) for run in runs]),
        by_steps=spread([(run, mean_over_steps(run, horizon)) for run in runs]),
        difference=difference,
        gain=spread([(run, run.sampled.success - run.curve.success[0]) for run in runs]),
        reached=tuple(reached),
    )
