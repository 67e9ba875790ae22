"""Evaluation: a plan of episodes, played into a run directory that can be resumed at any point."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import agentgym
from agentgym.env import AgentEnv, require_capabilities
from agentgym.episode import Episode, RunConfig, RunWriter, TaskSetRecord, final_episodes, read_episodes
from agentgym.errors import UsageError
from agentgym.metrics import Summary, summarise, write_summary
from agentgym.policies.base import Policy, make_policy
from agentgym.registry import find_env, make_env
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.task import resolve_split
from agentgym.workers import TimeLimits, make_backend

Observer = Callable[[Episode], None]


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to make a policy again: `make_policy(spec, **options)`."""

    spec: str
    options: dict[str, Any] = {}

    def make(self) -> Policy:
        """The policy itself."""
        return make_policy(self.spec, **self.options)

    def record(self, policy: Policy) -> dict[str, Any]:
        """What run.toml keeps of it."""
        return {"spec": self.spec, "options": self.options, **policy.describe()}


def plan(
    env: str,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    split: str = "test",
    episodes: int | None = None,
    tasks: list[str] | None = None,
    repeats: int = 1,
    seed: int = 0,
    retries: int = 1,
    limits: TimeLimits | None = None,
    name: str = "",
) -> RunConfig:
    """What will be run, without the policies.

    Args:
        env: id or family name.
        env_kwargs: options of the environment; `split` belongs to the plan, not here.
        split: split to play.
        episodes: number of episodes; the first tasks of the split are taken, `repeats` times each. None for the
            whole split.
        tasks: ids of the tasks, instead of the first ones.
        repeats: episodes a task.
        seed: seed of every reset.
        retries: times a faulted episode is tried again.
        limits: time limits.
        name: name of the run.

    Raises:
        UsageError: for an unknown id, option, split or task, or more tasks than the split has.
    """
    card = find_env(env)
    kwargs = dict(env_kwargs or {})
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number of at least 0, not {seed!r}")
    if repeats >= 1 and episodes is not None and episodes % repeats:
        raise UsageError(
            f"episodes ({episodes}) must be a multiple of repeats ({repeats}), for every task is repeated alike"
        )
    if repeats < 1 or (episodes is not None and episodes < 1):
        raise UsageError(f"episodes and repeats must be at least 1, not {episodes} and {repeats}")
    made = make_env(card.id, **kwargs)
    try:
        task_set = made.task_set
        split = resolve_split(task_set, split)
        if tasks is None:
            size = task_set.splits[split]
            wanted = size if episodes is None else -(-episodes // repeats)
            if wanted > size:
                raise UsageError(
                    f"split {split!r} of {task_set.name} has {size} tasks, {wanted} were asked for; "
                    f"lower --episodes or raise --repeats"
                )
            tasks = [task_set.at(split, index).id for index in range(wanted)]
        else:
            if not tasks or len(set(tasks)) != len(tasks):
                raise UsageError("tasks must name at least one task, and each only once; repeat them with repeats")
            for task_id in tasks:
                if task_set.get(task_id).split != split:
                    raise UsageError(f"task {task_id!r} is not in split {split!r}")
    finally:
        made.close()
    limits = limits or TimeLimits()
    return RunConfig(
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        env=card.id,
        env_kwargs=kwargs,
        task_set=_record(made),
        split=split,
        seed=seed,
        repeats=repeats,
        retries=retries,
        reset_timeout=limits.reset,
        step_timeout=limits.step,
        versions=_versions(),
        tasks=tasks,
    )


def evaluate(
    config: RunConfig,
    policies: Mapping[str, PolicySpec | Policy | str] | PolicySpec | Policy | str,
    out: Path | str,
    *,
    resume: bool = False,
    backend: str = "processes",
    workers: int = 1,
    envs_per_worker: int = 1,
    on_begin: Callable[[list[Episode]], None] | None = None,
    on_episode: Observer | None = None,
    notice: Callable[[str], None] | None = None,
) -> Summary:
    """Plays a plan into a run directory and writes its summary.

    Interrupted at any point, the directory can be continued with `resume=True`: no finished episode is played
    again and none is lost.

    Args:
        config: from `plan`.
        policies: a policy, or role -> policy ("*" for every role without its own): by name, as `PolicySpec`, or the
            object itself, whose run can then be resumed from Python only.
        out: run directory.
        resume: continue what `out` holds.
        backend, workers, envs_per_worker: see `make_backend`. They do not change the episodes.
        on_begin: told the attempts that a resumed directory holds already.
        on_episode: told every attempt as it is written.
        notice: told what a person should know (a torn line was dropped).

    Raises:
        UsageError: if the policies need what the environment lacks, or `out` holds another run.
        DataError: if the run directory is damaged or the disk is full; what was finished is kept.
    """
    out = Path(out)
    roles = dict(policies) if isinstance(policies, Mapping) else {"*": policies}
    specs_of = {role: PolicySpec(spec=given) if isinstance(given, str) else given for role, given in roles.items()}
    made = {role: given.make() if isinstance(given, PolicySpec) else given for role, given in specs_of.items()}
    try:
        for policy in made.values():
            require_capabilities(_class_of(config), policy.needs, who=f"policy {policy.name}")
        config = msgspec.structs.replace(
            config,
            policies={
                role: given.record(made[role]) if isinstance(given, PolicySpec) else {"spec": "", **given.describe()}
                for role, given in specs_of.items()
            },
        )
        _check_task_set(config)
        limits = TimeLimits(config.reset_timeout, config.step_timeout)
        workers = min(workers, max(1, len(config.tasks) * config.repeats))
        # Made first: a back end that cannot be had must not leave a run directory behind.
        pool = make_backend(backend, workers, envs_per_worker=envs_per_worker, limits=limits)
        try:
            with RunWriter(out, config, resume=resume, notice=notice) as writer:
                if on_begin is not None:
                    on_begin([episode for attempts in writer.done.values() for episode in attempts])
                episodes = rollout(
                    _remaining(config, writer.done),
                    config.env,
                    made,
                    env_kwargs=config.env_kwargs,
                    backend=pool,
                    retries=config.retries,
                )
                with contextlib.closing(episodes) as played:
                    for episode in played:
                        writer.append(episode)
                        if on_episode is not None:
                            on_episode(episode)
        finally:
            pool.close()
    finally:
        for role, policy in made.items():
            if policy is not specs_of[role]:  # an object of the caller's stays open
                policy.close()
    summary = summarise(read_episodes(out), config)
    write_summary(out, summary)
    return summary


def policies_of(config: RunConfig) -> dict[str, PolicySpec]:
    """The policies that a run directory records, to resume it."""
    return {
        role: PolicySpec(spec=record["spec"], options=dict(record.get("options", {})))
        for role, record in config.policies.items()
    }


def is_complete(config: RunConfig, episodes: list[Episode]) -> bool:
    """Whether every episode of the plan has ended, by a verdict or by its last allowed fault."""
    attempts: dict[str, list[Episode]] = {}
    for episode in episodes:
        attempts.setdefault(episode.episode_id, []).append(episode)
    return not list(_remaining(config, attempts)) and len(final_episodes(episodes)) > 0


def _remaining(config: RunConfig, done: Mapping[str, list[Episode]]) -> Iterator[EpisodeSpec]:
    for task_id in config.tasks:
        for repeat in range(config.repeats):
            spec = EpisodeSpec(task_id=task_id, split=config.split, seed=config.seed, repeat=repeat)
            attempts = done.get(spec.episode_id, [])
            if any(attempt.finished for attempt in attempts) or len(attempts) > config.retries:
                continue
            yield msgspec.structs.replace(spec, attempt=len(attempts))


def _check_task_set(config: RunConfig) -> None:
    """A plan made on other tasks (another version of a set, changed files) must not go on with these."""
    env = make_env(config.env, **config.env_kwargs)
    try:
        here = _record(env)
    finally:
        env.close()
    if (here.name, here.digest) != (config.task_set.name, config.task_set.digest):
        raise UsageError(
            f"the run was planned on {config.task_set.name} ({config.task_set.digest[:12]}), here it is {here.name} "
            f"({here.digest[:12]}): restore those tasks, or start another run"
        )


def _class_of(config: RunConfig) -> type[AgentEnv]:
    from agentgym.registry import env_class

    return env_class(config.env)


def _record(env: AgentEnv) -> TaskSetRecord:
    tasks = env.task_set
    return TaskSetRecord(
        name=tasks.name, version=tasks.version, digest=tasks.digest, licence=tasks.licence, source=tasks.source
    )


def _versions() -> dict[str, str]:
    versions = {"agentgym": agentgym.__version__, "python": platform.python_version()}
    for package in ("gymnasium", "numpy"):
        versions[package] = importlib.metadata.version(package)
    return versions
