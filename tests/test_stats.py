"""Statistics against scipy and statsmodels, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.contingency_tables import mcnemar as sm_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from agentgym import stats


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


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 10, 18, 30])
@pytest.mark.parametrize("p", [0.025, 0.5, 0.9, 0.975, 0.995])
def test_t_quantile_equals_scipy(df: int, p: float) -> None:
    assert stats.t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (5, 5), (3, 12), (40, 20)])
def test_mcnemar_equals_statsmodels(b: int, c: int) -> None:
    assert stats.mcnemar(b, c) == pytest.approx(sm_mcnemar([[3, b], [c, 4]], exact=True).pvalue)


def test_holm_equals_statsmodels() -> None:
    p = [0.01, 0.04, 0.03, 0.5, 0.001]
    assert stats.holm(p) == pytest.approx(multipletests(p, method="holm")[1])


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


@pytest.mark.parametrize("clusters", [8, 60])
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
    assert 0.92 <= hits / trials <= 0.98


def test_paired_bootstrap_is_of_the_difference() -> None:
    first = np.tile([0.0, 1.0], 50)
    low, high = stats.paired_bootstrap(first, first + 0.25)
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.25)
