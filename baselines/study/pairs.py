"""Comparison of methods over the same blocks: each seed of each cold start is a block in which every method ran once.

Values are taken as the sum of a method's effect, a block's effect and noise that is equally strong for all methods
(the randomised block design: Fisher 1935, The Design of Experiments). The noise of all methods together is estimated
with many more degrees of freedom than a handful of pairs has; with two methods it is exactly the paired t test. What
the pairs of two methods say alone is given beside it, for where the noise is not equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.stats import NAN_INTERVAL, Interval, bootstrap_mean, holm, t_cdf_at_angle, t_quantile

Block = tuple[str, int]
Values = Mapping[str, Mapping[Block, float]]  # method -> block -> value


class Difference(NamedTuple):
    """A method against another one.

    Attributes:
        value: mean difference, in the units of the values.
        interval: 95% interval with the noise of all methods.
        p: two-sided p-value, corrected for the comparisons made with it; nan where nothing can be said.
        pairs: blocks in which both ran.
        alone: 95% interval from these pairs alone.
        by_start: mean difference of the pairs of each cold start.
    """

    value: float
    interval: Interval
    p: float
    pairs: int
    alone: Interval
    by_start: dict[str, float]


class Additive(NamedTuple):
    """The fitted values.

    Attributes:
        methods: names.
        effects: (m,) of the methods.
        covariance: (m, m) of the effects.
        estimable: (m + b, m + b) projection onto what the runs that there are can tell.
        sigma: standard deviation of the noise; nan without degrees of freedom.
        df: degrees of freedom of the noise.
    """

    methods: tuple[str, ...]
    effects: NDArray[np.float64]
    covariance: NDArray[np.float64]
    estimable: NDArray[np.float64]
    sigma: float
    df: int


def fit(values: Values) -> Additive:
    """Least squares of method and block; runs may be missing."""
    methods = tuple(values)
    blocks = sorted({block for runs in values.values() for block in runs})
    cells = [(row, blocks.index(block), value) for row, m in enumerate(methods) for block, value in values[m].items()]
    design = np.zeros((len(cells), len(methods) + len(blocks)))
    for place, (method, block, _) in enumerate(cells):
        design[place, [method, len(methods) + block]] = 1.0
    observed = np.array([value for _, _, value in cells])
    inverse = np.linalg.pinv(design)
    solution = inverse @ observed
    df = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    residuals = observed - design @ solution
    sigma = math.sqrt(float(residuals @ residuals) / df) if df > 0 else math.nan
    count = len(methods)
    covariance = (inverse @ inverse.T)[:count, :count] * sigma**2
    return Additive(methods, solution[:count], covariance, inverse @ design, sigma, df)


def t_p_value(t: float, df: int) -> float:
    """Two-sided p-value of Student's t."""
    return 2 * (1 - t_cdf_at_angle(math.atan(abs(t) / math.sqrt(df)), df))


def contrast(model: Additive, first: str, second: str) -> tuple[float, float]:
    """Difference (second - first) of two methods' effects and its standard error; nan where no block connects them."""
    weights = np.zeros(len(model.estimable))
    weights[model.methods.index(second)] = 1.0
    weights[model.methods.index(first)] = -1.0
    if not np.allclose(weights @ model.estimable, weights, atol=1e-8):
        return math.nan, math.nan
    own = weights[: len(model.methods)]
    return float(own @ model.effects), math.sqrt(max(0.0, float(own @ model.covariance @ own)))


def raw_p(model: Additive, first: str, second: str) -> float:
    """Uncorrected two-sided p-value of the difference of two methods; nan where nothing can be said."""
    value, error = contrast(model, first, second)
    if model.df < 1 or math.isnan(value):
        return math.nan
    if error < 1e-12:
        return 1.0 if abs(value) < 1e-12 else 0.0
    return t_p_value(value / error, model.df)


def against(values: Values, baseline: str, model: Additive | None = None) -> dict[str, Difference]:
    """Every other method against the baseline; p-values are corrected for all of these comparisons (Holm 1979).

    Args:
        values: of all methods.
        baseline: name of one of them.
        model: the fit of the values, where it has been made already.
    """
    model = model or fit(values)
    others = [name for name in values if name != baseline]
    corrected = _holm([raw_p(model, baseline, other) for other in others])
    return {other: _difference(model, values, baseline, other, p) for other, p in zip(others, corrected, strict=True)}


def _difference(model: Additive, values: Values, first: str, second: str, p: float) -> Difference:
    value, error = contrast(model, first, second)
    interval = Interval(*NAN_INTERVAL)
    if model.df > 0 and not math.isnan(value):
        half = t_quantile(0.975, model.df) * error
        interval = Interval(value - half, value + half)
    shared = sorted(values[first].keys() & values[second].keys())
    pairs = [(block, values[second][block] - values[first][block]) for block in shared]
    starts = {
        start: float(np.mean([difference for _, difference in group]))
        for start, group in itertools.groupby(pairs, key=lambda pair: pair[0][0])
    }
    alone = bootstrap_mean([difference for _, difference in pairs])
    return Difference(value, interval, p, len(pairs), alone, starts)


def ranks(values: Values, model: Additive | None = None, *, level: float = 0.05) -> dict[str, int]:
    """1 + the number of methods shown to be better; all pairs are compared, corrected together (Holm 1979).

    Methods that cannot be told apart from all that stand above them share their rank.
    """
    model = model or fit(values)
    pairs = list(itertools.combinations(values, 2))
    found = dict.fromkeys(values, 1)
    for (first, second), p in zip(pairs, _holm([raw_p(model, *pair) for pair in pairs]), strict=True):
        if p < level:  # never where p is nan
            found[first if contrast(model, first, second)[0] > 0 else second] += 1
    return found


def visible(model: Additive, runs: int, comparisons: int, *, level: float = 0.05) -> float:
    """Smallest difference of two methods with this many runs each that counts as shown, the first of Holm's steps."""
    if model.df < 1 or runs < 1 or comparisons < 1:
        return math.nan
    return t_quantile(1 - level / (2 * comparisons), model.df) * model.sigma * math.sqrt(2 / runs)


def _holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction over those that are known."""
    known = [place for place, p in enumerate(p_values) if not math.isnan(p)]
    corrected = [math.nan] * len(p_values)
    for place, p in zip(known, holm([p_values[place] for place in known]), strict=True):
        corrected[place] = float(p)
    return corrected
