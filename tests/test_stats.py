"""Statistics against scipy and statsmodels, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.contingency_tables import mcnemar as sm_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from agentgym import stats
from agentgym.errors import UsageError


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (137, 500), (1, 1)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_equals_statsmodels(k: int, n: int, confidence: float) -> None:
    assert stats.wilson(k, n, confidence) == pytest.approx(
        proportion_confint(k, n, alpha=1 - confidence, method="wilson"), abs=1e-12
    )


def test_nothing_gives_nan_and_no_warning() -> None:
    assert all(map(math.isnan, stats.wilson(0, 0)))
    assert all(map(math.isnan, stats.bootstrap_mean([])))
    assert all(map(math.isnan, stats.bootstrap_mean([1.0])))
    assert math.isnan(stats.minimum_detectable_difference(0))
    assert math.isnan(stats.sign_flip_test([], []))
    assert all(map(math.isnan, stats.paired_difference(0, 0, 0)))
    assert stats.holm([]).size == stats.benjamini_hochberg([]).size == 0


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(UsageError, match="between 0 and n = 3"):
        stats.wilson(4, 3)
    with pytest.raises(UsageError, match="as many cluster labels"):
        stats.bootstrap_mean([1.0, 2.0], ["a"])
    with pytest.raises(UsageError, match="0 < p < 1"):
        stats.t_quantile(1.0, 3)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 10, 18, 30])
@pytest.mark.parametrize("p", [0.025, 0.5, 0.9, 0.975, 0.995, 0.99999])
def test_t_quantile_equals_scipy(df: int, p: float) -> None:
    assert stats.t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (5, 5), (3, 12), (40, 20), (300, 350)])
def test_mcnemar_equals_statsmodels(b: int, c: int) -> None:
    assert stats.mcnemar(b, c) == pytest.approx(sm_mcnemar([[3, b], [c, 4]], exact=True).pvalue)


def test_mcnemar_of_very_many_pairs() -> None:
    assert stats.mcnemar(100_000, 101_000) == pytest.approx(scipy.stats.binomtest(100_000, 201_000).pvalue, rel=1e-6)
    assert stats.mcnemar(0, 100_000) == 0.0


@pytest.mark.parametrize("p", [[0.01, 0.04, 0.03, 0.5, 0.001], [0.9, 0.8], [0.02], [0.03, 0.03, 0.03, 0.6]])
def test_corrections_equal_statsmodels(p: list[float]) -> None:
    assert stats.holm(p) == pytest.approx(multipletests(p, method="holm")[1])
    assert stats.benjamini_hochberg(p) == pytest.approx(multipletests(p, method="fdr_bh")[1])


def test_few_clusters_of_unequal_size_give_the_cluster_robust_interval() -> None:
    """The same as a regression on a constant with clustered errors."""
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(7), [1, 2, 3, 4, 5, 6, 7])
    values = rng.normal(size=28) + labels / 5
    fit = OLS(values, np.ones(28)).fit(
        cov_type="cluster", cov_kwds={"groups": labels, "use_correction": False, "df_correction": True}, use_t=True
    )
    half = scipy.stats.t.ppf(0.975, 6) * fit.bse[0] * math.sqrt(7 / 6)
    low, high = stats.bootstrap_mean(values, list(labels))
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half))


def test_many_values_fit_into_memory_in_blocks() -> None:
    values = np.random.default_rng(0).normal(size=30_000)
    low, high = stats.bootstrap_mean(values, resamples=400)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(30_000), rel=0.15)
    assert stats.bootstrap_mean(values, resamples=400) == (low, high)


@pytest.mark.parametrize("n", [4, 8, 13])
def test_exact_sign_flip_test_equals_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    first, second = rng.normal(size=n), rng.normal(0.6, 1.0, size=n)
    expected = scipy.stats.permutation_test(
        (first - second,), np.mean, permutation_type="samples", n_resamples=math.inf
    ).pvalue
    assert stats.sign_flip_test(first, second) == pytest.approx(expected, abs=1e-9)


def test_sign_flip_test_of_zeros_and_ones_is_mcnemar() -> None:
    first = np.array([1.0] * 3 + [0.0] * 9 + [1.0] * 20)
    second = np.array([0.0] * 3 + [1.0] * 9 + [1.0] * 20)
    assert stats.sign_flip_test(first, second) == pytest.approx(stats.mcnemar(3, 9))
    assert stats.sign_flip_test(first, first) == 1.0


def test_random_sign_flips_keep_their_level() -> None:
    """Four episodes a task that share its difference: flipping them one by one would find far too much."""
    rng = np.random.default_rng(0)
    labels = list(np.repeat(np.arange(20), 4))
    found = 0
    for trial in range(300):
        difference = np.repeat(rng.normal(size=20), 4)
        found += stats.sign_flip_test(np.zeros(80), difference, labels, resamples=300, seed=trial) <= 0.05
    assert 0.02 <= found / 300 <= 0.08


@pytest.mark.parametrize("n", [10, 40])
def test_paired_difference_covers(n: int) -> None:
    rng = np.random.default_rng(n)
    inside = 0
    for _ in range(1000):
        _, first, second = rng.multinomial(n, [0.7, 0.1, 0.2])
        low, high = stats.paired_difference(int(first), int(second), n)
        inside += low <= 0.1 <= high
    assert inside / 1000 >= 0.93


def test_pass_at_k_and_pass_hat_k() -> None:
    assert stats.pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert stats.pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert stats.pass_hat_k(5, 2, 2) == pytest.approx(1 / 10)
    assert stats.pass_at_k(5, 5, 5) == stats.pass_hat_k(5, 5, 5) == 1.0
    assert math.isnan(stats.pass_at_k(3, 1, 4))


def test_minimum_detectable_difference() -> None:
    assert stats.minimum_detectable_difference(392) == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize(("n", "p"), [(50, 0.5), (200, 0.1), (100, 0.9)])
def test_wilson_covers(n: int, p: float) -> None:
    """Exact coverage, averaged over p around the point to smooth the jumps of a discrete distribution."""
    coverage = []
    for q in np.linspace(p - 0.04, p + 0.04, 17):
        k = np.arange(n + 1)
        inside = [stats.wilson(int(i), n)[0] <= q <= stats.wilson(int(i), n)[1] for i in k]
        coverage.append(float(scipy.stats.binom.pmf(k, n, q)[inside].sum()))
    assert 0.93 <= np.mean(coverage) <= 0.97


@pytest.mark.parametrize("clusters", [3, 8, 20, 60])
def test_cluster_intervals_cover(clusters: int) -> None:
    """Five episodes a task whose difficulty they share: an interval that ignored that would cover about 70%."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(clusters), 5)
    hits = 0
    trials = 400
    for trial in range(trials):
        values = np.repeat(rng.normal(0.3, 1.0, clusters), 5) + rng.normal(0, 0.5, clusters * 5)
        low, high = stats.bootstrap_mean(values, list(labels), resamples=400, seed=trial)
        hits += low <= 0.3 <= high
    assert 0.91 <= hits / trials <= 0.98


def test_paired_bootstrap_is_of_the_difference() -> None:
    first = np.tile([0.0, 1.0], 50)
    low, high = stats.paired_bootstrap(first, first + 0.25)
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.25)
