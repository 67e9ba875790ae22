"""`MetaEnv`: the action is a system prompt, the reward is how much better an agent plays with it.

One step plays the same inner tasks with the same seeds under the prompt before and under the new one. The difference
is taken pair by pair, and the policy's own draws are the same in both (they depend on the inner episode's id alone),
so what is left is the effect of the prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from agentgym.env import AgentEnv, Outcome, require_capabilities
from agentgym.episode import Episode
from agentgym.errors import InfrastructureError, UsageError, choices
from agentgym.policies.base import Policy, make_policy
from agentgym.registry import find_env, make_env
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.task import Task, TaskSet, canonical_json
from agentgym.workers import Backend, SerialBackend

_SLOTS = 16
_LISTED = 20


class InnerBatches:
    """The task set of a `MetaEnv`: each task is a batch of inner tasks.

    Args:
        inner: task set of the inner environment.
        tasks: size of a batch (consecutive tasks of a split; what is left over is not played), or the ids of the only
            batch.

    Raises:
        UsageError: for an unknown or repeated id, or a size that no split can fill.
    """

    def __init__(self, inner: TaskSet, tasks: int | Sequence[str]) -> None:
        self._inner = inner
        self._size = tasks if isinstance(tasks, int) else len(tasks)
        self._ids = None if isinstance(tasks, int) else list(tasks)
        if isinstance(tasks, bool | str) or self._size < 1:
            raise UsageError(f"tasks must be a number of at least 1 or a list of inner task ids, not {tasks!r}")
        if self._ids is None:
            self._splits = {split: count // self._size for split, count in inner.splits.items() if count >= self._size}
        else:
            if len(set(self._ids)) < self._size:
                raise UsageError(f"inner tasks must differ, or a pair would count twice: {self._ids}")
            for task_id in self._ids:
                inner.get(task_id)
            self._splits = {inner.get(self._ids[0]).split: 1}
        if not self._splits:
            raise UsageError(f"no split of {inner.name} has {self._size} tasks: {dict(inner.splits)}; lower tasks")
        self.name = f"meta/{inner.name}/{self._size}"
        self.version = inner.version
        self.licence = inner.licence
        self.source = inner.source
        self.digest = hashlib.sha256(canonical_json([inner.digest, self._size, self._ids])).hexdigest()

    @property
    def splits(self) -> Mapping[str, int]:
        """Split name -> number of batches."""
        return self._splits

    def at(self, split: str, index: int) -> Task:
        """The batch at a position of a split."""
        ids = self._ids
        if ids is None:
            ids = [self._inner.at(split, index * self._size + i).id for i in range(self._size)]
        return Task(
            id=f"meta/{split}/{index}",
            family="meta",
            kind=self._inner.name,
            split=split,
            instruction="Write the system prompt with which the agent solves most of its tasks.",
            data={"tasks": ids},
        )

    def get(self, task_id: str) -> Task:
        """The batch of an id."""
        prefix, _, index = task_id.rpartition("/")
        split = prefix.removeprefix("meta/")
        if split in self._splits and index.isdecimal() and int(index) < self._splits[split]:
            task = self.at(split, int(index))
            if task.id == task_id:
                return task
        raise choices(f"task of {self.name}", task_id, [f"meta/{name}/0" for name in self._splits])

    def open(self, task: Task, name: str) -> bytes:
        """Batches have no files."""
        raise UsageError(f"task {task.id!r} of {self.name} has no file {name!r}; its inner tasks may have some")


class _State(msgspec.Struct):
    """All that changes over an episode.

    Attributes:
        prompt: the current prompt.
        seeds: seed of each inner task.
        scores: prompt -> score of each inner task, None where it ended in a fault or without a score.
        usage: what the inner episodes have spent.
    """

    prompt: str
    seeds: list[int]
    scores: dict[str, list[float | None]] = {}
    usage: dict[str, float] = {}


class MetaEnv(AgentEnv):
    """Prompt writing as an environment: the action is the whole system prompt of an agent that plays inner tasks.

    The reward of a step is the mean, over the pairs without a fault, of (score with the new prompt - score with the
    prompt before). The same prompt again gives exactly 0 and plays nothing. Seeds are drawn at reset and stay for the
    episode, so what was played under a prompt is not played again; `reset` plays the first one. The score in the info
    is the mean score under the current prompt. `extra` holds, after a step, `before` and `after` (means over the
    pairs), `pairs`, and `left_out`: pairs that lack a score on one side.

    Args:
        env: id or family name of the inner environment.
        policy: the agent, or how to make it (see `make_policy`). It must read the prompt from its requests' context.
        env_kwargs: options of the inner environment, its task set included.
        tasks: number of inner tasks in a batch, or their ids.
        prompt: the first prompt; None for the inner environment's own.
        backend: where the inner environments live; None for this thread. It is not closed.
        retries: times a faulted inner episode is tried again.
        **options: options of every environment but `tasks`: split, max_turns, max_observation, action_format,
            render_mode.

    Raises:
        UsageError: for an unknown inner environment, policy, option or task.
    """

    family: ClassVar[str] = "meta"
    version: ClassVar[int] = 0
    capabilities: ClassVar[frozenset[str]] = frozenset({"snapshot", "state_key"})
    replay: ClassVar[Literal["exact", "outcome", "none"]] = "none"  # the agent may be anything
    default_max_turns: ClassVar[int] = 5

    def __init__(
        self,
        env: str,
        policy: Policy | str,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        tasks: int | Sequence[str] = 8,
        prompt: str | None = None,
        backend: Backend | None = None,
        retries: int = 1,
        **options: Any,
    ) -> None:
        self.inner = find_env(env)
        self.env_kwargs = dict(env_kwargs or {})
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.retries = retries
        inner = make_env(self.inner.id, **self.env_kwargs)
        try:
            require_capabilities(inner, self.policy.needs, who=f"policy {self.policy.name}")
            self._inner_tasks = inner.task_set
            self._first_prompt = inner.system_prompt if prompt is None else prompt
        finally:
            inner.close()
        super().__init__(tasks=InnerBatches(self._inner_tasks, tasks), **options)
        self._backend = backend
        self._own_backend: SerialBackend | None = None
        self._state = _State("", [])

    @property
    def system_prompt(self) -> str:
        """What the writer of prompts should be told."""
        title = self.inner.title or self.inner.family
        return (
            f"You write the system prompt of an agent that plays {title}. Reply with the whole new prompt and nothing "
            "else. After each reply you see how the agent scored on the same tasks before and after."
        )

    def close(self) -> None:
        """Closes the inner environments."""
        if self._own_backend is not None:
            self._own_backend.close()
            self._own_backend = None

    # What AgentEnv asks for.

    def _start(self, task: Task) -> Outcome:
        seeds = self.np_random.integers(2**31, size=len(task.data["tasks"]))
        self._state = _State(self._first_prompt, [int(seed) for seed in seeds])
        self._fill(self._first_prompt)
        scores = self._known(self._first_prompt)
        played = f"With it {len(scores)} of {len(seeds)} episodes have a score" if scores else "No episode has a score"
        mean = _mean(scores)
        played += "." if mean is None else f"; the mean is {mean:.3f}."
        text = f"{task.instruction} {played} The prompt now is:\n{self._first_prompt or '(empty)'}"
        return Outcome(text, score=mean)

    def _act(self, action: str) -> Outcome:
        state = self._state
        if action == state.prompt:
            return Outcome("That is the prompt as it was; nothing changes.", reward=0.0)
        self._fill(state.prompt)  # only what had no score
        self._fill(action)
        before, after = state.scores[state.prompt], state.scores[action]
        pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
        if not pairs:
            raise InfrastructureError(
                f"none of the {len(before)} pairs of inner episodes has a score on both sides; play "
                f"{self.inner.id} with this policy by itself to see what breaks"
            )
        state.prompt = action
        extra = {
            "before": _mean([old for old, _ in pairs]),
            "after": _mean([new for _, new in pairs]),
            "pairs": len(pairs),
            "left_out": len(before) - len(pairs),
        }
        reward = math.fsum(new - old for old, new in pairs) / len(pairs)
        return Outcome(
            _describe(self._batch(), before, after, extra), score=_mean(self._known(action)), reward=reward, extra=extra
        )

    def _save(self) -> bytes:
        return msgspec.msgpack.encode(self._state, order="deterministic")

    def _load(self, task: Task, payload: bytes) -> None:
        state = msgspec.msgpack.decode(payload, type=_State)
        size = len(task.data["tasks"])
        if len(state.seeds) != size or any(len(scores) != size for scores in state.scores.values()):
            raise UsageError("snapshot holds another number of inner tasks than its task; take it again")
        if state.prompt not in state.scores:
            raise UsageError("snapshot has no scores of its own prompt; take it again")
        self._state = state

    def _state_key(self) -> str:
        return hashlib.sha256(canonical_json([self._batch(), self._state.seeds, self._state.prompt])).hexdigest()[:16]

    def _usage(self) -> dict[str, float]:
        return dict(self._state.usage)

    # Private.

    def _batch(self) -> list[str]:
        assert self.task is not None
        ids: list[str] = self.task.data["tasks"]
        return ids

    def _known(self, prompt: str) -> list[float]:
        return [score for score in self._state.scores[prompt] if score is not None]

    def _fill(self, prompt: str) -> None:
        """Plays the inner tasks that have no score under a prompt yet."""
        state = self._state
        scores = list(state.scores.get(prompt) or [None] * len(state.seeds))
        specs: dict[str, tuple[int, EpisodeSpec]] = {}
        for i, (task_id, seed) in enumerate(zip(self._batch(), state.seeds, strict=True)):
            if scores[i] is None:
                spec = EpisodeSpec(task_id=task_id, split=self._inner_tasks.get(task_id).split, seed=seed)
                specs[spec.episode_id] = (i, spec)
        if self._backend is None and self._own_backend is None and specs:
            self._own_backend = SerialBackend(min(len(state.seeds), _SLOTS))
        for episode in rollout(
            [spec for _, spec in specs.values()],
            self.inner.id,
            self.policy,
            env_kwargs=self.env_kwargs,
            backend=self._backend or self._own_backend,
            retries=self.retries,
            system_prompt=prompt,
        ):
            scores[specs[episode.episode_id][0]] = _score(episode)
            _add_usage(state.usage, episode)
        state.scores[prompt] = scores


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _score(episode: Episode) -> float | None:
    """Score of an inner episode, its verdict where it has none; None for a fault or an unknown end."""
    if episode.outcome == "fault":
        return None
    if episode.score is not None:
        return episode.score
    return {"success": 1.0, "failure": 0.0}.get(episode.outcome)


def _add_usage(total: dict[str, float], episode: Episode) -> None:
    total["inner_episodes"] = total.get("inner_episodes", 0.0) + 1.0
    total["inner_turns"] = total.get("inner_turns", 0.0) + len(episode.turns)
    for spent in episode.usage.values():
        for name, value in spent.items():
            total[name] = total.get(name, 0.0) + value


def _describe(tasks: list[str], before: list[float | None], after: list[float | None], extra: Mapping[str, Any]) -> str:
    def text(score: float | None) -> str:
        return "fault" if score is None else f"{score:.2f}"

    lines = [f"Mean score before {extra['before']:.3f}, after {extra['after']:.3f}, over {extra['pairs']} tasks."]
    if extra["left_out"]:
        lines.append(f"{extra['left_out']} tasks are left out, for a fault of the world or without a score.")
    rows = list(zip(tasks, before, after, strict=True))
    lines += [f"{task}: {text(old)} -> {text(new)}" for task, old, new in rows[:_LISTED]]
    if len(rows) > _LISTED:
        lines.append(f"and {len(rows) - _LISTED} more")
    return "\n".join(lines)
