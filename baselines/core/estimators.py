"""Advantage estimators in plain numpy: normalise over a key, recur backwards.

All statistics are explicit: over which set, centred only or scaled too, which degrees of freedom, how often each value
counts. A set of one value, or of equal values, gives 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentgym.errors import UsageError

Floats = NDArray[np.float64]
EPSILON = 1e-6


def normalise(
    values: ArrayLike,
    keys: Sequence[Hashable] | None = None,
    *,
    scale: bool = True,
    ddof: int = 1,
    counts: ArrayLike | None = None,
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = EPSILON,
) -> Floats:
    """Centres values within the sets of equal key, and divides by the sets' standard deviations.

    Args:
        values: (n,).
        keys: n keys; None for one set.
        scale: divide by (standard deviation + epsilon); otherwise only centre.
        ddof: 1 for the sample, 0 for the population standard deviation.
        counts: how often each value enters its set's statistics (a trajectory once a turn, for instance).
        singleton: what a set of one gives: 0, or its raw value (verl-agent's episode term).
        epsilon: added to the standard deviation.

    Returns:
        (n,) float64.

    Raises:
        UsageError: for a value that is not finite.
    """
    given = np.asarray(values, dtype=np.float64)
    times = np.ones(len(given)) if counts is None else np.asarray(counts, dtype=np.float64)
    result = np.zeros(len(given))
    for places in _sets(keys, len(given)):
        value, weight = given[places], times[places]
        if not np.isfinite(value).all():
            # All comparisons with it are false, so it would pass for a set of equal values.
            wrong = int(np.flatnonzero(~np.isfinite(value))[0])
            place = f"value {wrong}" + (f" of the set {keys[places[0]]!r}" if keys is not None else "")
            raise UsageError(f"{place} is {value[wrong]}: rewards and scores must be finite, look where it was made")
        total = weight.sum()
        if total <= 1:
            result[places] = value if singleton == "raw" else 0.0
        elif value.max() > value.min():
            centred = value - (weight * value).sum() / total
            if scale:
                centred /= np.sqrt((weight * centred**2).sum() / (total - ddof)) + epsilon
            result[places] = centred
    return result


def _sets(keys: Sequence[Hashable] | None, size: int) -> list[list[int]]:
    if keys is None:
        return [list(range(size))] if size else []
    sets: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        sets.setdefault(key, []).append(place)
    return list(sets.values())


def leave_one_out(
    values: ArrayLike,
    keys: Sequence[Hashable] | None = None,
    *,
    counts: ArrayLike | None = None,
    singleton: Literal["zero", "raw"] = "zero",
) -> Floats:
    """Each value minus the mean of the others of its set, which is N / (N - 1) times its distance from the mean.

    Args:
        values: (n,).
        keys: n keys; None for one set.
        counts: how often each value enters its set (N is their sum then).
        singleton: what a set of one gives.

    Returns:
        (n,) float64.
    """
    times = np.ones(len(np.asarray(values))) if counts is None else np.asarray(counts, dtype=np.float64)
    result = normalise(values, keys, scale=False, counts=times, singleton=singleton)
    for places in _sets(keys, len(result)):
        total = times[places].sum()
        if total > 1:
            result[places] *= total / (total - 1)
    return result


def whiten(parts: Sequence[ArrayLike], *, scale: bool = True, ddof: int = 1) -> list[Floats]:
    """Normalises the numbers of all parts as one set: all tokens of a batch, given by sample.

    Args:
        parts: arrays (T_i,).
        scale, ddof: see `normalise`.

    Returns:
        (T_i,) float64 each.
    """
    if not parts:
        return []
    arrays = [np.asarray(part, dtype=np.float64) for part in parts]
    return np.split(normalise(np.concatenate(arrays), scale=scale, ddof=ddof), np.cumsum([len(a) for a in arrays])[:-1])


def overlong_penalty(length: int, limit: int, cache: int) -> float:
    """DAPO's soft penalty of long answers (Yu et al. 2025, arXiv 2503.14476).

    Args:
        length: L, in tokens.
        limit: L_max.
        cache: c, tokens below the limit in which the penalty grows from 0 to 1.

    Returns:
        0 up to limit - cache, then a line down to -1 at the limit, and -1 beyond.
    """
    if length > limit:
        return -1.0
    return min(0.0, (limit - cache - length) / cache) if cache else 0.0


def discounted_returns(rewards: ArrayLike, gamma: float) -> Floats:
    """G_t = r_t + gamma G_{t+1}, (n,) -> (n,)."""
    returns = np.asarray(rewards, dtype=np.float64).copy()
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += gamma * returns[turn + 1]
    return returns


def generalised_advantages(rewards: ArrayLike, values: ArrayLike, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """GAE of one episode whose value after the end is 0 (Schulman et al. 2015, arXiv 1506.02438).

    Args:
        rewards: (n,).
        values: (n,), of the states before each reward.
        gamma, lam: discount and trace decay.

    Returns:
        Advantages and returns (advantage + value), (n,) each.
    """
    value = np.asarray(values, dtype=np.float64)
    following = np.append(value[1:], 0.0)
    delta = np.asarray(rewards, dtype=np.float64) + gamma * following - value
    advantages = discounted_returns(delta, gamma * lam)
    return advantages, advantages + value


def history_keys(states: Sequence[Hashable], length: int) -> list[tuple[Hashable, ...]]:
    """For each turn, its last `length` states, itself included; the whole prefix where there are fewer."""
    return [tuple(states[max(0, turn + 1 - length) : turn + 1]) for turn in range(len(states))]


def fuzzy_keys(texts: Sequence[str], threshold: float) -> list[int]:
    """Greedy first-fit clusters of similar texts.

    Args:
        texts: n texts.
        threshold: smallest `difflib.SequenceMatcher` ratio to a cluster's first text.

    Returns:
        n cluster numbers.
    """
    known: dict[str, int] = {}
    firsts: list[str] = []
    for text in texts:
        if text not in known:
            matcher = difflib.SequenceMatcher(b=text, autojunk=False)
            for number, first in enumerate(firsts):
                matcher.set_seq1(first)
                # The two quick ratios are upper bounds and cost far less.
                if (
                    matcher.real_quick_ratio() >= threshold
                    and matcher.quick_ratio() >= threshold
                    and matcher.ratio() >= threshold
                ):
                    known[text] = number
                    break
            else:
                known[text] = len(firsts)
                firsts.append(text)
    return [known[text] for text in texts]
