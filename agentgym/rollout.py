"""The one runner: many environments, one policy (or one a role), episodes out.

`rollout` keeps every slot of a back end busy, gathers what waits for a decision, and yields each attempt as soon as
it ends. A fault ends one attempt, never the run, and never carries a reward.
"""

from __future__ import annotations

import hashlib
import math
import queue
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from agentgym.env import Info
from agentgym.episode import Episode, Turn, make_episode_id
from agentgym.errors import DataError, InfrastructureError, UsageError
from agentgym.host import Answer, EnvSource, Fault, Start, Started, Step, Stepped
from agentgym.policies.base import Context, Decision, Policy, Reply, Request, make_policy
from agentgym.registry import find_env
from agentgym.spaces import find_surrogate
from agentgym.workers import Backend, SerialBackend

RETRIED = frozenset(
    {"exception", "garbage", "killed", "reset timeout", "step timeout", "infrastructure", "lost", "policy"}
)


class EpisodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to be played.

    Attributes:
        task_id, split: the task.
        seed: seed of the reset.
        repeat: number of the repetition; with the seed it fixes the policy's draws.
        attempt: attempts made before.
        group, twin_of: labels kept in the episode; a twin draws as the episode it names.
        parent_id, fork_turn, snapshot, prefix: continue another episode from its turn `fork_turn` on.
    """

    task_id: str
    split: str = ""
    seed: int = 0
    repeat: int = 0
    attempt: int = 0
    group: str = ""
    twin_of: str = ""
    parent_id: str = ""
    fork_turn: int = -1
    snapshot: bytes | None = None
    prefix: tuple[Turn, ...] = ()

    @property
    def episode_id(self) -> str:
        """The id of the episode."""
        base = make_episode_id(self.task_id, self.seed, self.repeat)
        return f"{base}@{self.fork_turn}" if self.parent_id else base


def policy_seed(episode_id: str) -> int:
    """Seed of an episode's policy draws: a function of its id alone."""
    return int.from_bytes(hashlib.sha256(b"policy|" + episode_id.encode()).digest()[:8], "little")


class _Live:
    """An episode in a slot."""

    __slots__ = (
        "began",
        "begun",
        "context",
        "deciding",
        "doomed",
        "hint",
        "info",
        "observation",
        "owes",
        "pending",
        "replay",
        "sent",
        "spec",
        "turns",
    )

    def __init__(self, spec: EpisodeSpec) -> None:
        self.spec = spec
        self.turns: list[Turn] = [msgspec.structs.replace(turn) for turn in spec.prefix]  # the parent keeps its own
        self.begun = self.sent = time.monotonic()
        self.replay = "none"
        self.began = False
        self.owes = False  # a command is out and its answer is not in
        self.deciding: Policy | None = None  # who has the request and has not answered
        self.doomed: Fault | None = None  # ends the attempt as soon as nothing is owed
        self.pending: tuple[Reply, str, float, bool] | None = None
        self.context: Context
        self.observation: str
        self.info: Info
        self.hint: str | None = None


_in_use: weakref.WeakSet[Backend] = weakref.WeakSet()


class Runner:
    """Plays episodes; see `rollout`, which is the way to use it.

    Args:
        source: how workers make the environment.
        env_id: id recorded in the episodes.
        policies: role -> policy; "*" serves every role without one of its own.
        backend: where the environments live.
        retries: times a faulted episode is tried again.
        system_prompt: replaces the environment's own in what policies see.
    """

    def __init__(
        self,
        source: EnvSource,
        env_id: str,
        policies: Mapping[str, Policy],
        backend: Backend,
        retries: int,
        system_prompt: str | None = None,
    ) -> None:
        self._source = source
        self._env_id = env_id
        self._policies = policies
        self._backend = backend
        self._retries = retries
        self._system_prompt = system_prompt
        self._hint = any("expert" in policy.needs for policy in policies.values())
        self._gather = any(policy.gather for policy in policies.values())
        self._live: dict[int, _Live] = {}
        self._waiting: list[int] = []  # slots that wait for a decision
        self._owing = 0  # commands without an answer
        self._decided: queue.SimpleQueue[tuple[int, _Live, Future[Reply], float]] = queue.SimpleQueue()
        self._deciding = 0
        self._retry: deque[EpisodeSpec] = deque()

    def run(self, specs: Iterable[EpisodeSpec]) -> Iterator[Episode]:
        """Yields every attempt when it ends; closed early, it leaves the back end fit for another rollout."""
        if self._backend in _in_use:
            raise UsageError("this back end is used by another rollout; finish or close that one first")
        _in_use.add(self._backend)
        try:
            yield from self._run(specs)
        finally:
            _in_use.discard(self._backend)
            live = list(self._live.values())
            self._live.clear()
            try:
                if live:
                    self._backend.cancel()
            finally:
                for episode in live:
                    self._let_go(episode.spec.episode_id)

    def _let_go(self, episode_id: str) -> None:
        for policy in {id(policy): policy for policy in self._policies.values()}.values():
            policy.finish(episode_id)

    def _run(self, specs: Iterable[EpisodeSpec]) -> Iterator[Episode]:
        todo = iter(specs)
        free = list(range(self._backend.slots))[::-1]
        while True:
            while free:
                spec = self._retry.popleft() if self._retry else next(todo, None)
                if spec is None:
                    break
                self._start(free.pop(), spec)
            if not self._live:
                return
            ended: list[tuple[int, Episode]] = []
            try:
                self._advance(ended)
            except Exception:
                for _, episode in ended:  # a bad call of one episode must not lose others that had ended
                    yield episode
                raise
            for slot, episode in ended:
                free.append(slot)
                yield episode

    def _advance(self, ended: list[tuple[int, Episode]]) -> None:
        """Waits for what comes next and deals with it; what ended is added to `ended`."""
        if self._owing or self._deciding:
            timeout = None if self._owing or self._decided.empty() else 0.0
            for slot, answer in self._backend.receive(timeout):
                live = self._live.get(slot)
                if live is not None:
                    self._answered(slot, live, answer, ended)
        while not self._decided.empty():
            slot, live, future, seconds = self._decided.get()
            self._deciding -= 1
            if self._live.get(slot) is live:
                self._apply(slot, live, _result(future), seconds, ended)
        if self._waiting and not (self._gather and self._owing):
            self._decide(ended)

    def _start(self, slot: int, spec: EpisodeSpec) -> None:
        self._live[slot] = _Live(spec)
        self._send_start(slot, spec, ())

    def _send_start(self, slot: int, spec: EpisodeSpec, completions: tuple[str, ...]) -> None:
        self._owing += 1
        self._live[slot].owes = True
        start = Start(self._source, spec.task_id, spec.split, spec.seed, spec.snapshot, self._hint, completions)
        self._backend.send(slot, start)

    def _answered(self, slot: int, live: _Live, answer: Answer, ended: list[tuple[int, Episode]]) -> None:
        if live.owes:
            live.owes = False
            self._owing -= 1
        if live.doomed is not None:
            self._end(slot, live, live.doomed, ended)
        elif isinstance(answer, Stepped):
            self._stepped(slot, live, answer, ended)
        elif isinstance(answer, Started):
            self._started(slot, live, answer, ended)
        elif answer.kind == "usage":
            raise UsageError(answer.message)
        else:
            if slot in self._waiting:  # its worker died while it waited for a decision
                self._waiting.remove(slot)
            if answer.kind == "lost" and (live.replay == "exact" or not live.began):
                played = live.turns[len(live.spec.prefix) :]
                self._send_start(slot, live.spec, tuple(turn.completion for turn in played))
            else:
                self._end(slot, live, answer, ended)

    def _started(self, slot: int, live: _Live, answer: Started, ended: list[tuple[int, Episode]]) -> None:
        live.replay = answer.replay
        if live.began:  # brought back after its worker was lost
            if answer.observation != live.observation or answer.info["state_key"] != live.info["state_key"]:
                message = "re-stepping after a lost worker gave another observation; is the environment deterministic?"
                self._end(slot, live, Fault("lost", message), ended)
                return
        else:
            seed = policy_seed(live.spec.twin_of or live.spec.episode_id)
            live.context = Context(
                live.spec.episode_id,
                answer.task,
                answer.system_prompt if self._system_prompt is None else self._system_prompt,
                answer.instruction,
                answer.tools,
                answer.action_format,
                answer.prompt_templates,
                seed,
            )
            live.observation, live.info = answer.observation, answer.info
            live.began = True
        live.hint = answer.hint
        if live.pending is not None:  # the decision had been made already
            self._step(slot, live)
        elif live.deciding is None:
            self._waiting.append(slot)

    def _decide(self, ended: list[tuple[int, Episode]]) -> None:
        """Asks the policies about every waiting slot."""
        waiting, self._waiting = self._waiting, []
        for policy, slots in self._by_policy(waiting):
            hinted = "expert" in policy.needs
            asked = time.monotonic()
            requests = []
            for slot in slots:
                live = self._live[slot]
                info = live.info
                hint = live.hint if hinted else None
                requests.append(Request(live.context, info["role"], live.observation, info, live.turns, hint))
            decisions = policy.submit(requests)
            if not isinstance(decisions, Sequence) or len(decisions) != len(slots):
                raise UsageError(
                    f"policy {policy.name}: submit must return one decision for each of {len(slots)} requests"
                )
            for slot, decision in zip(slots, decisions, strict=True):
                live = self._live[slot]
                live.deciding = policy
                if isinstance(decision, Future):
                    self._deciding += 1
                    decision.add_done_callback(self._report(slot, live, asked))
                else:
                    self._apply(slot, live, decision, time.monotonic() - asked, ended)

    def _by_policy(self, slots: list[int]) -> list[tuple[Policy, list[int]]]:
        if len(self._policies) == 1 and "*" in self._policies:
            return [(self._policies["*"], slots)]
        groups: dict[int, tuple[Policy, list[int]]] = {}
        for slot in slots:
            policy = self._policy(self._live[slot].info["role"])
            groups.setdefault(id(policy), (policy, []))[1].append(slot)
        return list(groups.values())

    def _report(self, slot: int, live: _Live, asked: float) -> Any:
        def report(future: Future[Reply]) -> None:
            self._decided.put((slot, live, future, time.monotonic() - asked))
            self._backend.wake()

        return report

    def _policy(self, role: str) -> Policy:
        policy = self._policies.get(role) or self._policies.get("*")
        if policy is None:
            raise UsageError(f"no policy for role {role!r}; there are policies for {sorted(self._policies)}")
        return policy

    def _apply(
        self, slot: int, live: _Live, decision: Decision, seconds: float, ended: list[tuple[int, Episode]]
    ) -> None:
        """Sends a decision to the environment."""
        policy, live.deciding = live.deciding, None
        assert policy is not None
        fault = _decision_fault(decision)
        if fault is None:
            assert isinstance(decision, Reply)
            live.pending = (decision, policy.name, seconds, "expert" in policy.needs)
            if not live.owes:
                self._step(slot, live)
        elif live.owes:  # it is just being brought back; that answer must come in first
            live.doomed = fault
        else:
            self._end(slot, live, fault, ended)

    def _step(self, slot: int, live: _Live) -> None:
        assert live.pending is not None
        live.sent = time.monotonic()
        live.owes = True
        self._owing += 1
        self._backend.send(slot, Step(live.pending[0].text, self._hint))

    def _stepped(self, slot: int, live: _Live, answer: Stepped, ended: list[tuple[int, Episode]]) -> None:
        assert live.pending is not None
        reply, policy_name, seconds, hinted = live.pending
        live.pending = None
        info, action = answer.info, answer.action
        before = live.info
        score = info["score"]
        live.turns.append(
            Turn(
                observation=live.observation,
                completion=reply.text,
                action=None if action == reply.text else action,
                reward=answer.reward,
                role=before["role"],
                valid=info["valid"],
                score=None if math.isnan(score) else score,
                terminated=answer.terminated,
                truncated=answer.truncated,
                state_key=before["state_key"],
                admissible=before["admissible"],
                new_checkpoints=_new(before["checkpoints"], info["checkpoints"]),
                feedback=info["feedback"],
                extra=before["extra"],
                messages=reply.messages,
                kept_messages=reply.kept_messages,
                arrays=_arrays(reply),
                kept_ids=reply.kept_ids,
                policy=policy_name if len(self._policies) > 1 else "",
                policy_version=reply.policy_version,
                hinted=hinted,
                usage=reply.usage,
                policy_seconds=seconds,
                env_seconds=time.monotonic() - live.sent,
            )
        )
        live.observation, live.info, live.hint = answer.observation, info, answer.hint
        if answer.terminated or answer.truncated:
            ended.append((slot, self._finish(slot, live, None)))
        else:
            self._waiting.append(slot)

    def _end(self, slot: int, live: _Live, fault: Fault, ended: list[tuple[int, Episode]]) -> None:
        """Ends an attempt by a fault, and plans the next one."""
        if fault.kind in RETRIED and live.spec.attempt < self._retries:
            self._retry.append(msgspec.structs.replace(live.spec, attempt=live.spec.attempt + 1))
        ended.append((slot, self._finish(slot, live, fault)))

    def _finish(self, slot: int, live: _Live, fault: Fault | None) -> Episode:
        del self._live[slot]
        spec = live.spec
        self._let_go(spec.episode_id)
        episode = Episode(
            episode_id=spec.episode_id,
            task_id=spec.task_id,
            env=self._env_id,
            seed=spec.seed,
            repeat=spec.repeat,
            attempt=spec.attempt,
            kind=live.info["kind"] if live.began else "",
            split=live.info["split"] if live.began else spec.split,
            outcome="fault",
            turns=live.turns,
            policies={role: policy.name for role, policy in self._policies.items()},
            group=spec.group,
            parent_id=spec.parent_id,
            fork_turn=spec.fork_turn,
            twin_of=spec.twin_of,
            usage=_total_usage(live.turns[len(spec.prefix) :]),
            seconds=time.monotonic() - live.begun,
        )
        if fault is not None:
            episode.cause, episode.message = fault.kind, fault.message
            for turn in live.turns:  # a fault never carries a reward
                turn.reward = 0.0
                turn.score = None
            return episode
        info = live.info
        last = live.turns[-1]
        success = info["success"]
        episode.outcome = "success" if success == 1 else "failure" if success == 0 else "unknown"
        episode.cause = "turn limit" if last.truncated else "goal" if success == 1 else "ended"
        episode.total_reward = math.fsum(turn.reward for turn in live.turns)
        episode.score = last.score
        episode.final_observation = live.observation
        episode.final = {
            "state_key": info["state_key"],
            "admissible": info["admissible"],
            "checkpoints": info["checkpoints"],
            "extra": info["extra"],
        }
        episode.metrics = info["extra"].get("metrics", {})
        if info["usage"]:
            episode.usage["environment"] = dict(info["usage"])
        return episode


def _result(future: Future[Reply]) -> Decision:
    """What a finished future holds, as a decision."""
    if future.cancelled():
        return InfrastructureError("the policy cancelled the request")
    return future.exception() or future.result()


def _decision_fault(decision: Decision) -> Fault | None:
    """What is wrong with an answer; a bad call and an interrupt are raised, for they concern the whole run."""
    if isinstance(decision, Reply) and isinstance(decision.text, str):
        if decision.text.isascii() or find_surrogate(decision.text) < 0:
            return None
        return Fault("policy", "the policy's answer has a lone surrogate, which is not text")
    if isinstance(decision, UsageError) or (
        isinstance(decision, BaseException) and not isinstance(decision, Exception)
    ):
        raise decision
    if isinstance(decision, Exception):
        kind = "infrastructure" if isinstance(decision, InfrastructureError | DataError) else "policy"
        return Fault(kind, f"{type(decision).__name__}: {decision}")
    return Fault("policy", f"the policy answered {decision!r:.100}, which is no Reply with text")


def _new(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    if len(before) == len(after):
        return ()
    known = set(before)
    return tuple(checkpoint for checkpoint in after if checkpoint not in known)


def _arrays(reply: Reply) -> dict[str, Any]:
    if reply.completion_ids is None:
        return {}
    arrays = {
        "prompt_ids": reply.prompt_ids,
        "completion_ids": reply.completion_ids,
        "logprobs": reply.logprobs,
    }
    return {name: value for name, value in arrays.items() if value is not None}


def _total_usage(turns: list[Turn]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for turn in turns:
        if turn.usage:
            total = totals.setdefault(turn.role, {})
            for name, value in turn.usage.items():
                total[name] = total.get(name, 0.0) + value
    return totals


def rollout(
    specs: Iterable[EpisodeSpec],
    env: str,
    policy: Policy | str | Mapping[str, Policy],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
    retries: int = 0,
    system_prompt: str | None = None,
) -> Generator[Episode, None, None]:
    """Plays episodes and yields each attempt, faulted ones too, in the order of ending.

    Args:
        specs: what to play; read lazily.
        env: id or family name of a registered environment.
        policy: one policy or its name, or role -> policy ("*" for all other roles).
        env_kwargs: options of the environment; must be picklable for processes and Ray.
        backend: where the environments live; None for serial with one slot. It is not closed.
        retries: times a faulted episode is tried again.
        system_prompt: replaces the environment's own in what policies see.

    Raises:
        UsageError: for a bad call: unknown id, option, task or role.
    """
    card = find_env(env)
    if isinstance(policy, str):
        policy = make_policy(policy)
    policies = {"*": policy} if isinstance(policy, Policy) else dict(policy)
    used = SerialBackend(1) if backend is None else backend
    source = EnvSource(card.entry_point, dict(env_kwargs or {}))
    runner = Runner(source, card.id, policies, used, retries, system_prompt)
    try:
        yield from runner.run(specs)
    finally:
        if backend is None:
            used.close()
