"""Metrics of a run: success, score, turns, tokens, cost, pass@k and pass^k, with intervals; and paired comparison.

Faults never count in a denominator; they are shown beside it. Numbers that cannot be known are None.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from agentgym import stats
from agentgym.episode import SUMMARY, Episode, RunConfig, final_episodes, write_atomically

NO_KIND = "(no kind)"  # faults that came before the environment said what the task was


class Estimate(msgspec.Struct, frozen=True):
    """A mean with its interval; None while unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class Group(msgspec.Struct, kw_only=True):
    """Metrics of a set of episodes.

    Attributes:
        episodes: episodes of the plan that ended, faults included.
        finished: those with an end of the environment.
        unknown: finished ones without a verdict.
        faults: episodes whose last attempt was a fault.
        fault_causes: cause -> attempts that it ended, those that were tried again included.
        retried: attempts that were faults and were tried again.
        solved: successes.
        success: success rate among episodes with a verdict.
        score, total_reward: means over finished episodes.
        turns, turns_solved: mean number of turns, of all and of solved episodes.
        invalid: share of actions that were not valid.
        tokens, cost: sums over all attempts; `tokens_per_solved` and `cost_per_solved` divide them by the successes.
        pass_at_k, pass_hat_k: k -> mean over the tasks with at least k verdicts, for k up to the repeats; empty
            without repeats.
        policy_seconds, env_seconds: mean a turn.
        metrics: means of the family's own numbers.
    """

    episodes: int = 0
    finished: int = 0
    unknown: int = 0
    faults: int = 0
    retried: int = 0
    fault_causes: dict[str, int] = {}
    solved: int = 0
    success: Estimate = Estimate()
    score: Estimate = Estimate()
    total_reward: Estimate = Estimate()
    turns: float | None = None
    turns_solved: float | None = None
    invalid: float | None = None
    tokens: float = 0.0
    cost: float = 0.0
    tokens_per_solved: float | None = None
    cost_per_solved: float | None = None
    pass_at_k: dict[str, float] = {}
    pass_hat_k: dict[str, float] = {}
    policy_seconds: float | None = None
    env_seconds: float | None = None
    metrics: dict[str, float] = {}


class Summary(msgspec.Struct, kw_only=True):
    """summary.json: the whole run and each kind of task.

    Attributes:
        planned: number of episodes of the plan.
        overall: all of them.
        kinds: kind -> its episodes.
        minimum_detectable_difference: of two success rates with as many episodes each.
    """

    env: str
    task_set: str
    split: str
    planned: int
    overall: Group
    kinds: dict[str, Group] = {}
    minimum_detectable_difference: float | None = None


def summarise(episodes: Sequence[Episode], config: RunConfig) -> Summary:
    """Metrics of a run.

    Args:
        episodes: all attempts, as read from the log.
        config: the run's configuration.
    """
    kinds: dict[str, list[Episode]] = defaultdict(list)
    kind_of: dict[str, str] = {}
    for episode in episodes:
        if episode.kind:
            kind_of[episode.task_id] = episode.kind
    for episode in episodes:
        kinds[episode.kind or kind_of.get(episode.task_id, "")].append(episode)
    overall = _group(episodes)
    judged = overall.finished - overall.unknown
    return Summary(
        env=config.env,
        task_set=config.task_set.name,
        split=config.split,
        planned=len(config.tasks) * config.repeats,
        overall=overall,
        kinds={kind or NO_KIND: _group(kinds[kind]) for kind in sorted(kinds)} if any(kinds) else {},
        minimum_detectable_difference=_known(stats.minimum_detectable_difference(judged)),
    )


def write_summary(run: Path, summary: Summary) -> None:
    """Writes summary.json."""
    write_atomically(run / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def _group(attempts: Sequence[Episode]) -> Group:
    final = final_episodes(list(attempts))
    finished = [episode for episode in final if episode.finished]
    judged = [episode for episode in finished if episode.outcome != "unknown"]
    solved = [episode for episode in judged if episode.outcome == "success"]
    turns = [turn for episode in finished for turn in episode.turns]
    tokens, cost = _spent(attempts)
    scored = [episode for episode in finished if _is_number(episode.score)]
    rewarded = [episode for episode in finished if _is_number(episode.total_reward)]
    return Group(
        episodes=len(final),
        finished=len(finished),
        unknown=len(finished) - len(judged),
        faults=len(final) - len(finished),
        retried=len(attempts) - len(final),
        fault_causes=dict(sorted(Counter(e.cause for e in attempts if not e.finished).items())),
        solved=len(solved),
        success=_success(judged),
        score=_mean([e.score or 0.0 for e in scored], [e.task_id for e in scored]),
        total_reward=_mean([e.total_reward or 0.0 for e in rewarded], [e.task_id for e in rewarded]),
        turns=_average(len(e.turns) for e in finished),
        turns_solved=_average(len(e.turns) for e in solved),
        invalid=_average(not turn.valid for turn in turns),
        tokens=tokens,
        cost=cost,
        tokens_per_solved=tokens / len(solved) if solved and tokens else None,
        cost_per_solved=cost / len(solved) if solved and cost else None,
        pass_at_k=_pass(judged, stats.pass_at_k),
        pass_hat_k=_pass(judged, stats.pass_hat_k),
        policy_seconds=_average(turn.policy_seconds for turn in turns),
        env_seconds=_average(turn.env_seconds for turn in turns),
        metrics=_family_metrics(finished),
    )


def _success(judged: Sequence[Episode]) -> Estimate:
    """Wilson for one episode a task; over clusters of tasks when tasks are repeated.

    Where all tasks have the same rate, clusters show no spread: then each task counts as one trial for Wilson.
    """
    if not judged:
        return Estimate()
    solved = [float(episode.outcome == "success") for episode in judged]
    tasks = [episode.task_id for episode in judged]
    if len(set(tasks)) == len(tasks):
        low, high = stats.wilson(sum(solved), len(solved))
        return Estimate(sum(solved) / len(solved), low, high)
    estimate = _mean(solved, tasks)
    if estimate.value is not None and not _has_width(estimate.low, estimate.high):
        distinct = len(set(tasks))
        return Estimate(estimate.value, *stats.wilson(estimate.value * distinct, distinct))
    clip = [None if bound is None else min(1.0, max(0.0, bound)) for bound in (estimate.low, estimate.high)]
    return Estimate(estimate.value, *clip)


def _mean(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    if not values:
        return Estimate()
    low, high = stats.bootstrap_mean(values, clusters)
    return Estimate(math.fsum(values) / len(values), _known(low), _known(high))


def _average(values: Iterable[float]) -> float | None:
    found = [value for value in values if math.isfinite(value)]
    return math.fsum(found) / len(found) if found else None


def _has_width(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and high - low > 1e-9


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _spent(attempts: Sequence[Episode]) -> tuple[float, float]:
    tokens = cost = 0.0
    for episode in attempts:
        for spent in episode.usage.values() or [turn.usage for turn in episode.turns]:
            tokens += sum(_known(spent.get(name, 0.0)) or 0.0 for name in ("prompt_tokens", "completion_tokens"))
            cost += _known(spent.get("cost", 0.0)) or 0.0
    return tokens, cost


def _pass(judged: Sequence[Episode], estimate: Callable[[int, int, int], float]) -> dict[str, float]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for episode in judged:
        counts[episode.task_id][0] += 1
        counts[episode.task_id][1] += episode.outcome == "success"
    most = max((n for n, _ in counts.values()), default=0)
    result = {}
    for k in range(1, most + 1) if most > 1 else ():
        values = [estimate(n, solved, k) for n, solved in counts.values() if n >= k]
        result[str(k)] = math.fsum(values) / len(values)
    return result


def _family_metrics(finished: Sequence[Episode]) -> dict[str, float]:
    names = sorted({name for episode in finished for name in episode.metrics})
    means = {name: _average(e.metrics[name] for e in finished if name in e.metrics) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


class Comparison(msgspec.Struct, kw_only=True):
    """Two runs on the same episodes (task, seed, repeat), paired.

    Attributes:
        pairs: episodes that both finished with a verdict.
        left_out: episodes that only one of them has, or that one of them lost to a fault.
        first, second: success rates over the pairs.
        difference: second - first; its interval is Agresti and Min's, or a bootstrap over tasks if they are repeated.
        only_first, only_second: pairs that only one of them solved.
        p_value: exact McNemar test, or a sign-flip test over tasks if they are repeated.
    """

    pairs: int
    left_out: int
    first: float | None = None
    second: float | None = None
    difference: Estimate = Estimate()
    only_first: int = 0
    only_second: int = 0
    p_value: float | None = None


def compare(first: Sequence[Episode], second: Sequence[Episode]) -> Comparison:
    """Compares two runs, episode by episode.

    Args:
        first, second: final episodes of each run.
    """
    one, two = ({e.episode_id: e for e in run if e.outcome in ("success", "failure")} for run in (first, second))
    ids = sorted(one.keys() & two.keys())
    everything = {e.episode_id for e in first} | {e.episode_id for e in second}
    if not ids:
        return Comparison(pairs=0, left_out=len(everything))
    a = [float(one[i].outcome == "success") for i in ids]
    b = [float(two[i].outcome == "success") for i in ids]
    only_first = sum(x > y for x, y in zip(a, b, strict=True))
    only_second = sum(y > x for x, y in zip(a, b, strict=True))
    tasks = [one[i].task_id for i in ids]
    distinct = len(set(tasks))
    if distinct == len(tasks):
        low, high = stats.paired_difference(only_first, only_second, len(ids))
        p_value = stats.mcnemar(only_first, only_second)
    else:
        low, high = stats.paired_bootstrap(a, b, tasks)
        p_value = stats.sign_flip_test(a, b, tasks)
    if not _has_width(low, high):  # all tasks differ alike: each of them counts as one pair
        share = distinct / len(tasks)
        low, high = stats.paired_difference(round(only_first * share), round(only_second * share), distinct)
    return Comparison(
        pairs=len(ids),
        left_out=len(everything) - len(ids),
        first=sum(a) / len(a),
        second=sum(b) / len(b),
        difference=Estimate((sum(b) - sum(a)) / len(a), _known(low), _known(high)),
        only_first=only_first,
        only_second=only_second,
        p_value=p_value,
    )
