"""Statistics of success rates and scores, on numpy alone. Intervals are (low, high); of no data they are (nan, nan)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NAN_INTERVAL = (math.nan, math.nan)


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927).

    Args:
        successes: number of successes, 0 to n.
        n: number of independent trials.
        confidence: coverage.
    """
    if n <= 0:
        return Interval(*NAN_INTERVAL)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low, high)


def bootstrap_mean(
    values: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of a mean over clusters, such as the tasks that several episodes share.

    With fewer than 20 clusters a t interval of the clusters' means is given, for a percentile bootstrap would be
    too narrow; with one cluster there is none.

    Args:
        values: (n,) one value an episode.
        clusters: (n,) label of each value's cluster; None if each is its own.
        confidence: coverage.
        resamples: bootstrap resamples.
        seed: of the resampling.
    """
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        return Interval(*NAN_INTERVAL)
    labels = np.arange(data.size) if clusters is None else np.unique(np.asarray(clusters), return_inverse=True)[1]
    sums = np.bincount(labels, weights=data)
    counts = np.bincount(labels)
    k = len(sums)
    if k < 2:
        return Interval(*NAN_INTERVAL)
    if k < 20:
        means = sums / counts
        half = t_quantile(0.5 + confidence / 2, k - 1) * float(means.std(ddof=1)) / math.sqrt(k)
        centre = float(means.mean())
        return Interval(centre - half, centre + half)
    draws = np.random.default_rng(seed).integers(0, k, (resamples, k))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(low), float(high))


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t by bisection of its distribution function.

    Args:
        p: probability, 0 < p < 1.
        df: degrees of freedom, at least 1.
    """
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: int) -> float:
    """Distribution function for t >= 0: a finite series in the angle (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(df))
    cosine = math.cos(theta)
    if df % 2:
        total, term = 0.0, cosine
        for j in range(1, (df - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * j / (2 * j + 1)
        inside = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        total, term = 0.0, 1.0
        for j in range(1, df // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * j - 1) / (2 * j)
        inside = math.sin(theta) * total
    return 0.5 + inside / 2


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided McNemar test (McNemar 1947): p-value of the discordant pairs.

    Args:
        only_first: pairs that only the first solved.
        only_second: pairs that only the second solved.
    """
    n = only_first + only_second
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / 2**n))


def paired_difference(only_first: int, only_second: int, n: int, confidence: float = 0.95) -> Interval:
    """Interval of the difference (second - first) of two success rates over n pairs, one a task.

    Half a pair is added to each of the four cells first (Agresti and Min 2005), which keeps the interval honest where
    all pairs agree and a bootstrap would have no width.
    """
    if n <= 0:
        return Interval(*NAN_INTERVAL)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    b, c, total = only_first + 0.5, only_second + 0.5, n + 2
    centre = (c - b) / total
    half = z * math.sqrt(b + c - (c - b) ** 2 / total) / total
    return Interval(max(-1.0, centre - half), min(1.0, centre + half))


def paired_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of mean(second - first) over pairs; see `bootstrap_mean`."""
    difference = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    return bootstrap_mean(difference, clusters, confidence=confidence, resamples=resamples, seed=seed)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples succeeds) (Chen et al. 2021); nan if k > n."""
    if not 0 < k <= n:
        return math.nan
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(all of k samples succeed) (tau-bench, Yao et al. 2024); nan if k > n."""
    if not 0 < k <= n:
        return math.nan
    return math.comb(successes, k) / math.comb(n, k)


def holm(p_values: Sequence[float]) -> NDArray[np.float64]:
    """p-values corrected for many comparisons (Holm 1979), in the order given."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(steps, 1.0)
    return corrected


def minimum_detectable_difference(n: int, p: float = 0.5, *, confidence: float = 0.95, power: float = 0.8) -> float:
    """Difference of two success rates, n episodes each, that a two-sided test finds with the given power."""
    if n <= 0:
        return math.nan
    z = NormalDist().inv_cdf(0.5 + confidence / 2) + NormalDist().inv_cdf(power)
    return z * math.sqrt(2 * p * (1 - p) / n)
