"""Re-steps recorded episodes without their policy and names the first turn that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentgym.episode import Episode, RunConfig, final_episodes, read_config, read_episodes
from agentgym.policies.base import Policy, Reply, Request
from agentgym.registry import env_class, make_env
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import TimeLimits, make_backend

_TURN_FIELDS = (
    "observation",
    "action",
    "reward",
    "valid",
    "score",
    "terminated",
    "truncated",
    "state_key",
    "admissible",
    "new_checkpoints",
    "feedback",
    "role",
)
_END_FIELDS = (
    "env",
    "kind",
    "split",
    "outcome",
    "cause",
    "score",
    "total_reward",
    "final_observation",
    "final",
    "metrics",
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where a re-stepped episode differs from its record.

    Attributes:
        episode_id: the episode.
        turn: 0-based turn, or -1 for the end of the episode.
        field: what differs.
        recorded, replayed: both values, as text.
    """

    episode_id: str
    turn: int
    field: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        where = "at its end" if self.turn < 0 else f"at turn {self.turn}"
        return f"{self.episode_id} {where}: {self.field} was {self.recorded}, re-stepping gives {self.replayed}"


class ReplayReport(msgspec.Struct, kw_only=True):
    """What re-stepping a run has shown.

    Attributes:
        verified: "observations, rewards and outcomes", "outcomes", or "nothing": what the family can repeat.
        episodes: number of episodes compared.
        faults: number of recorded faults, which have nothing to compare.
        differences: at most one an episode.
        problems: differences that concern the whole run (its task set changed).
    """

    verified: str
    episodes: int = 0
    faults: int = 0
    differences: list[Difference] = []
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether everything that could be compared was equal."""
        return not self.differences and not self.problems


class RecordedPolicy(Policy):
    """Says again what was recorded.

    Args:
        episodes: the recorded episodes.
    """

    name = "recorded"

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._completions = {e.episode_id: [turn.completion for turn in e.turns] for e in episodes}

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """The recorded completions of this turn; a record that ends too early is an error of its episode."""
        return [Reply(text=self._completions[r.context.episode_id][len(r.history)]) for r in requests]


def compare(recorded: Episode, replayed: Episode) -> Difference | None:
    """The first difference between an episode and its repetition, timings and policy data apart."""

    def difference(turn: int, field: str, before: Any, after: Any) -> Difference:
        return Difference(
            episode_id=recorded.episode_id,
            turn=turn,
            field=field,
            recorded=f"{before!r:.300}",
            replayed=f"{after!r:.300}",
        )

    fields = [*_TURN_FIELDS, "extra"]
    if replayed.outcome == "fault":  # which carries no reward
        fields = [field for field in fields if field not in ("reward", "score")]
    for index, (before, after) in enumerate(zip(recorded.turns, replayed.turns, strict=False)):
        for field in fields:
            old, new = _plain(getattr(before, field)), _plain(getattr(after, field))
            if old != new:
                return difference(index, field, old, new)
    if replayed.outcome == "fault":
        message = f"{replayed.cause}: {replayed.message}"
        if len(replayed.turns) >= len(recorded.turns) and replayed.cause == "policy":
            message = "the environment goes on after the last recorded turn"
        return difference(len(replayed.turns), "outcome", recorded.outcome, message)
    if len(recorded.turns) != len(replayed.turns):
        return difference(len(replayed.turns), "number of turns", len(recorded.turns), len(replayed.turns))
    for field in _END_FIELDS:
        old, new = _plain(getattr(recorded, field)), _plain(getattr(replayed, field))
        if old != new:
            return difference(-1, field, old, new)
    return None


def _plain(value: Any) -> Any:
    """As it reads after a round trip through the log."""
    if value is None or isinstance(value, str | int | float):
        return value
    return msgspec.json.decode(msgspec.json.encode(value))


def replay_run(
    run: Path,
    *,
    backend: str = "processes",
    workers: int = 1,
    notice: Callable[[str], None] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> ReplayReport:
    """Re-steps every finished episode of a run.

    Args:
        run: run directory.
        backend, workers: where to re-step; see `make_backend`.
        notice: told when a torn last line is dropped.
        on_episode: told each episode as it has been re-stepped.

    Raises:
        DataError: if the run directory is damaged.
        UsageError: if its environment or tasks are unknown here.
    """
    config = read_config(run)
    attempts = read_episodes(run, notice=notice)
    episodes = final_episodes(attempts)
    finished = {episode.episode_id: episode for episode in episodes if episode.finished}
    kind = env_class(config.env).replay
    verified = {"exact": "observations, rewards and outcomes", "outcome": "outcomes", "none": "nothing"}[kind]
    report = ReplayReport(verified=verified, faults=len(episodes) - len(finished))
    _check_task_set(config, report)
    _check_plan(config, attempts, report)
    planned = set(config.episode_ids())
    finished = {k: e for k, e in finished.items() if _check_identity(e, report) and k in planned}
    if kind == "none" or not finished:
        return report
    specs = [EpisodeSpec(task_id=e.task_id, seed=e.seed, repeat=e.repeat) for e in finished.values()]
    limits = TimeLimits(config.reset_timeout or 120.0, config.step_timeout or 60.0)
    pool = make_backend(backend, min(workers, len(specs)), limits=limits)
    try:
        policy = RecordedPolicy(list(finished.values()))
        for replayed in rollout(specs, config.env, policy, env_kwargs=config.env_kwargs, backend=pool):
            recorded = finished[replayed.episode_id]  # their ids were checked above
            found = compare(recorded, replayed) if kind == "exact" else _compare_outcome(recorded, replayed)
            report.episodes += 1
            if found is not None:
                report.differences.append(found)
            if on_episode is not None:
                on_episode(replayed)
    finally:
        pool.close()
    report.differences.sort(key=lambda difference: difference.episode_id)
    return report


def _compare_outcome(recorded: Episode, replayed: Episode) -> Difference | None:
    if recorded.outcome == replayed.outcome:
        return None
    return Difference(
        episode_id=recorded.episode_id, turn=-1, field="outcome", recorded=recorded.outcome, replayed=replayed.outcome
    )


def _check_plan(config: RunConfig, attempts: Sequence[Episode], report: ReplayReport) -> None:
    """The log must hold the planned episodes, each with one end."""
    planned = set(config.episode_ids())
    ends = Counter(episode.episode_id for episode in attempts if episode.finished)
    seen = {episode.episode_id for episode in attempts}
    if planned - seen:
        report.problems.append(
            f"{len(planned - seen)} of {len(planned)} planned episodes are missing, such as {min(planned - seen)}; "
            "if the run was only stopped, continue it with agentgym eval --resume"
        )
    if seen - planned:
        report.problems.append(f"{len(seen - planned)} episodes are not in the plan, such as {min(seen - planned)}")
    twice = sorted(key for key, count in ends.items() if count > 1)
    if twice:
        report.problems.append(f"{len(twice)} episodes have more than one end, such as {twice[0]}")
    for episode in attempts:
        if not episode.finished and episode.turns and (episode.turns[-1].terminated or episode.turns[-1].truncated):
            report.differences.append(
                Difference(
                    episode_id=episode.episode_id,
                    turn=len(episode.turns) - 1,
                    field="outcome",
                    recorded="fault",
                    replayed="the episode had already ended at this turn, so it was no fault",
                )
            )


def _check_identity(episode: Episode, report: ReplayReport) -> bool:
    """Whether an episode's id says what it says itself."""
    own = EpisodeSpec(
        task_id=episode.task_id,
        seed=episode.seed,
        repeat=episode.repeat,
        parent_id=episode.parent_id,
        fork_turn=episode.fork_turn,
    ).episode_id
    if own == episode.episode_id:
        return True
    report.differences.append(
        Difference(
            episode_id=episode.episode_id, turn=-1, field="episode_id", recorded=episode.episode_id, replayed=own
        )
    )
    return False


def _check_task_set(config: RunConfig, report: ReplayReport) -> None:
    env = make_env(config.env, **config.env_kwargs)
    try:
        here = env.task_set
        for field in ("name", "digest"):
            before, now = getattr(config.task_set, field), getattr(here, field)
            if before != now:
                report.problems.append(
                    f"task set {field} was {before}, here it is {now}: other tasks or another version"
                )
    finally:
        env.close()
