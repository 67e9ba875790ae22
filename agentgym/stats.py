"""Statistics of success rates and scores, on numpy alone. Intervals are (low, high); of no data they are (nan, nan)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentgym.errors import UsageError

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

    Raises:
        UsageError: for more successes than trials.
    """
    if n <= 0:
        return Interval(*NAN_INTERVAL)
    if not 0 <= successes <= n:
        raise UsageError(f"successes must lie between 0 and n = {n}, not {successes}")
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
    """Percentile bootstrap interval of the mean of all values, resampling whole clusters.

    A cluster is what episodes share, such as their task. With fewer than 20 clusters a percentile bootstrap is too
    narrow; then it is the t interval with the cluster-robust standard error of the mean (k - 1 degrees of freedom for
    k clusters; Miller 2024, arXiv 2411.00640), which may reach beyond the range of the values. Values that are all
    equal have an interval of no width: for a success rate with one episode a task use `wilson`.

    Args:
        values: (n,) one value an episode.
        clusters: (n,) label of each value's cluster, of one type; None if each is its own.
        confidence: coverage.
        resamples: bootstrap resamples.
        seed: of the resampling.

    Returns:
        The interval; (nan, nan) with fewer than two clusters.

    Raises:
        UsageError: if there is not one label a value.
    """
    sums, counts = _cluster_sums(values, clusters)
    k = len(sums)
    if k < 2:
        return Interval(*NAN_INTERVAL)
    if k < 20:
        centre = float(sums.sum() / counts.sum())
        residuals = sums - centre * counts
        error = math.sqrt(k / (k - 1) * float(residuals @ residuals)) / float(counts.sum())
        half = t_quantile(0.5 + confidence / 2, k - 1) * error
        return Interval(centre - half, centre + half)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, _BLOCK // k)
    for start in range(0, resamples, rows):
        draws = rng.integers(0, k, (min(rows, resamples - start), k))
        means[start : start + rows] = sums[draws].sum(1) / counts[draws].sum(1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(low), float(high))


_BLOCK = 1_000_000  # resampled clusters at a time: bounds the memory


def _cluster_sums(
    values: ArrayLike, clusters: Sequence[object] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and number of the values of each cluster, in the order of the clusters' labels."""
    data = np.asarray(values, dtype=float)
    if clusters is None:
        return data, np.ones(data.size)
    if len(clusters) != data.size:
        raise UsageError(f"{data.size} values need as many cluster labels, not {len(clusters)}")
    labels = np.unique(np.asarray(clusters), return_inverse=True)[1]
    return np.bincount(labels, weights=data).astype(np.float64), np.bincount(labels).astype(np.float64)


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t, by bisection of its distribution function.

    Args:
        p: probability, 0 < p < 1.
        df: degrees of freedom, at least 1.

    Raises:
        UsageError: for any other p or df.
    """
    if not 0 < p < 1 or df < 1:
        raise UsageError(f"a t quantile needs 0 < p < 1 and df >= 1, not p = {p} and df = {df}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, math.pi / 2
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf_at_angle(middle, df) < p else (low, middle)
    return math.sqrt(df) * math.tan(low)


def t_cdf_at_angle(theta: float, df: int) -> float:
    """Distribution function at t = sqrt(df) tan(theta) >= 0: a finite series (Abramowitz and Stegun 26.7.3, 26.7.4)."""
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
    k = np.arange(min(only_first, only_second))
    log_choose = np.concatenate(([0.0], np.cumsum(np.log((n - k) / (k + 1)))))
    return min(1.0, float(2 * np.exp(log_choose - n * math.log(2)).sum()))


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


def sign_flip_test(
    first: ArrayLike,
    second: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> float:
    """Two-sided p-value of mean(second - first) when the sign of each cluster's differences is a coin's toss.

    The paired permutation test of Fisher (1935): exact over all sign patterns while these are no more than
    `resamples`, else by random ones, counting the observed one (Phipson and Smyth 2010), so that it is never 0.

    Args:
        first, second: (n,) values of the same episodes.
        clusters: (n,) label of each pair's cluster; None if each is its own.
        resamples: greatest number of sign patterns.
        seed: of the random patterns.

    Returns:
        The p-value; nan of no pairs.
    """
    sums, _ = _cluster_sums(np.asarray(second, dtype=float) - np.asarray(first, dtype=float), clusters)
    sums = sums[sums != 0]  # flipping them changes nothing
    if not len(sums):
        return 1.0 if np.size(first) else math.nan
    least = abs(float(sums.sum())) * (1 - 1e-9)  # equal sums may differ in their last bits
    if 2 ** len(sums) <= resamples:
        patterns = (np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ sums) >= least))
    rng = np.random.default_rng(seed)
    hits = 0
    rows = max(1, _BLOCK // len(sums))
    for start in range(0, resamples, rows):
        signs = 2 * rng.integers(0, 2, (min(rows, resamples - start), len(sums)), dtype=np.int8) - 1
        hits += int(np.count_nonzero(np.abs(signs @ sums) >= least))
    return (hits + 1) / (resamples + 1)


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


def benjamini_hochberg(p_values: Sequence[float]) -> NDArray[np.float64]:
    """p-values corrected to bound the false discovery rate (Benjamini and Hochberg 1995), in the order given."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)[::-1]
    steps = np.minimum.accumulate(p[order] * len(p) / np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(steps, 1.0)
    return corrected


def minimum_detectable_difference(n: int, p: float = 0.5, *, confidence: float = 0.95, power: float = 0.8) -> float:
    """Difference of two success rates that a two-sided unpaired test finds with the given power.

    Args:
        n: independent episodes of each.
        p: success rate about which they lie.
        confidence, power: 1 - the rates of false and of missed findings.
    """
    if n <= 0:
        return math.nan
    z = NormalDist().inv_cdf(0.5 + confidence / 2) + NormalDist().inv_cdf(power)
    return z * math.sqrt(2 * p * (1 - p) / n)
