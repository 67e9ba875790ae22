"""The runner: faults stay with their episode, and episodes do not depend on where they are played."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

import tests.worlds as worlds
from agentgym.episode import Episode
from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies.base import Policy, Reply
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import Backend, ProcessBackend, TimeLimits, make_backend
from tests.shared_data import need

EXPECTED = {
    "raise in reset": "exception",
    "raise in step": "exception",
    "killed in step": "killed",
    "exit in step": "exception",
    "hang in reset": "reset timeout",
    "hang in step": "step timeout",
    "hang without the interpreter": "step timeout",
    "garbage observation": "garbage",
    "garbage reward": "garbage",
    "unpicklable info": "garbage",
    "infrastructure": "infrastructure",
    "broken data": "data",
}
LIMITS = TimeLimits(reset=1.5, step=0.7)


def specs(n: int, **kwargs: Any) -> list[EpisodeSpec]:
    return [EpisodeSpec(task_id=f"count/{i:04}", split="test", **kwargs) for i in range(n)]


def faulty_specs(kinds: set[str]) -> list[EpisodeSpec]:
    tasks = worlds.faulty_tasks("")
    chosen = [tasks.at("test", i) for i in range(tasks.splits["test"])]
    return [EpisodeSpec(task_id=t.id, split="test") for t in chosen if t.kind in kinds | {"ok"}]


def comparable(episodes: list[Episode]) -> list[Episode]:
    """Episodes without their timings, by id."""
    rows = []
    for episode in sorted(episodes, key=lambda e: (e.episode_id, e.attempt)):
        turns = [msgspec.structs.replace(turn, policy_seconds=0.0, env_seconds=0.0) for turn in episode.turns]
        rows.append(msgspec.structs.replace(episode, seconds=0.0, turns=turns))
    return rows


@pytest.fixture(params=["processes", "processes sharing", "threads", "ray"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    name, _, sharing = str(request.param).partition(" ")
    if name == "ray":
        need("ray")
    limits = TimeLimits(reset=20.0, step=1.5) if name == "ray" else LIMITS  # an actor takes seconds to start
    made = make_backend(name, 2, envs_per_worker=3 if sharing else 1, limits=limits)
    yield made
    made.close()


def playable(backend: Backend) -> set[str]:
    """The faults that a back end can survive."""
    name = type(backend).__name__
    if name == "ThreadBackend":  # a thread cannot be killed, and shares its interpreter
        return set(worlds.FAULTS) - {"killed in step", "hang without the interpreter", "unpicklable info"}
    if name == "RayBackend":  # ray's own pickling and its start-up time make these another test
        return set(worlds.FAULTS) - {"hang in reset", "unpicklable info"}
    return set(worlds.FAULTS)


@pytest.mark.slow
def test_every_fault_stays_with_its_episode_and_carries_no_reward(backend: Backend) -> None:
    kinds = playable(backend)
    episodes = list(rollout(faulty_specs(kinds), "faulty", worlds.UpPolicy(), backend=backend))
    assert len(episodes) == len({e.episode_id for e in episodes}) == len(kinds) + len(worlds.FAULTS)
    for episode in episodes:
        tasks = worlds.faulty_tasks("")
        kind = tasks.get(episode.task_id).kind
        if kind == "ok":
            assert episode.outcome == "success", (kind, episode.cause, episode.message)
            assert episode.total_reward == pytest.approx(1.0)
        else:
            assert (episode.outcome, episode.cause) == ("fault", EXPECTED[kind]), (kind, episode.message)
            assert episode.total_reward is None
            assert episode.score is None
            assert all(turn.reward == 0.0 and turn.score is None for turn in episode.turns)


def test_faults_of_one_thread_are_typed_too() -> None:
    kinds = {
        "raise in reset",
        "raise in step",
        "garbage observation",
        "garbage reward",
        "infrastructure",
        "broken data",
    }
    for episode in rollout(faulty_specs(kinds), "faulty", worlds.UpPolicy()):
        kind = worlds.faulty_tasks("").get(episode.task_id).kind
        assert episode.cause == EXPECTED.get(kind, "goal")


@pytest.mark.parametrize(("name", "workers", "sharing"), [("serial", 3, 1), ("threads", 3, 1), ("processes", 2, 3)])
def test_episodes_do_not_depend_on_where_they_are_played(name: str, workers: int, sharing: int) -> None:
    plan = specs(12, seed=5)
    policy = worlds.UpPolicy(noise=0.3)
    alone = comparable(list(rollout(plan, "count", policy)))
    backend = make_backend(name, workers, envs_per_worker=sharing)
    try:
        assert comparable(list(rollout(plan, "count", policy, backend=backend))) == alone
    finally:
        backend.close()


def test_repeats_differ_and_twins_agree() -> None:
    policy = worlds.UpPolicy(noise=0.4)
    repeats = [EpisodeSpec(task_id="count/0001", split="test", repeat=i) for i in range(6)]
    actions = {tuple(t.completion for t in e.turns) for e in rollout(repeats, "count", policy)}
    assert len(actions) > 1
    first = EpisodeSpec(task_id="count/0001", split="test", repeat=0)
    twin = EpisodeSpec(task_id="count/0001", split="test", repeat=99, twin_of=first.episode_id)
    one, two = rollout([first, twin], "count", policy)
    assert [t.completion for t in one.turns] == [t.completion for t in two.turns]


def test_killed_worker_that_owes_nothing_is_noticed_and_replaced() -> None:
    backend = ProcessBackend(1, 1, LIMITS)

    class Killer(worlds.UpPolicy):
        killed = False

        def act(self, requests: Any) -> list[Reply]:
            if not Killer.killed and requests[0].context.task.id == "count/0001":
                Killer.killed = True
                pid = backend.workers[0].process.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            return super().act(requests)

    try:
        episodes = list(rollout(specs(4), "count", Killer(), backend=backend, retries=1))
    finally:
        backend.close()
    outcomes = [(e.task_id, e.attempt, e.outcome, e.cause) for e in episodes]
    assert ("count/0001", 0, "fault", "killed") in outcomes
    assert ("count/0001", 1, "success", "goal") in outcomes
    assert len(outcomes) == 5


def test_neighbours_of_a_crash_are_brought_back_without_a_trace() -> None:
    plan = [*faulty_specs({"killed in step"}), *faulty_specs({"killed in step"})[1:2]]
    plan = [msgspec.structs.replace(spec, repeat=i) for i, spec in enumerate(plan)]
    backend = make_backend("processes", 1, envs_per_worker=len(plan), limits=LIMITS)
    try:
        episodes = list(rollout(plan, "faulty", worlds.UpPolicy(), backend=backend))
    finally:
        backend.close()
    alone = [s for s in plan if worlds.faulty_tasks("").get(s.task_id).kind == "ok"]
    healthy = [e for e in episodes if e.kind == "ok"]
    assert comparable(healthy) == comparable(list(rollout(alone, "faulty", worlds.UpPolicy())))
    assert [e.cause for e in episodes if e.kind != "ok"] == ["killed"] * (len(plan) - len(healthy))


def test_retries_are_recorded_and_end(tmp_path: Any) -> None:
    marker = str(tmp_path / "healed")
    plan = specs(1)
    episodes = list(
        rollout(plan, "flaky", worlds.UpPolicy(), env_kwargs={"marker": marker, "tasks": "count/tasks"}, retries=3)
    )
    assert [(e.attempt, e.outcome) for e in episodes] == [(0, "fault"), (1, "success")]
    episodes = list(rollout(faulty_specs({"raise in step"})[2:4], "faulty", worlds.UpPolicy(), retries=2))
    assert [e.outcome for e in episodes].count("fault") in (0, 3)
    broken = [e for e in rollout(faulty_specs({"broken data"}), "faulty", worlds.UpPolicy(), retries=2) if e.kind == ""]
    assert len(broken) == 1, "damaged data does not heal by trying again"


@pytest.mark.parametrize("answer", ["raises", "nonsense", "surrogate", "server down"])
def test_a_policy_that_fails_is_a_fault_of_that_episode(answer: str) -> None:
    class Bad(worlds.UpPolicy):
        def submit(self, requests: Any) -> Any:
            decisions: list[Any] = []
            for request in requests:
                future: Future[Reply] = Future()
                if request.context.task.id != "count/0002":
                    future.set_result(Reply(text="up"))
                elif answer == "raises":
                    future.set_exception(ValueError("planted"))
                elif answer == "nonsense":
                    future.set_result("up")  # type: ignore[arg-type]
                elif answer == "surrogate":
                    future.set_result(Reply(text="\ud800"))
                else:
                    future.set_exception(InfrastructureError("server down"))
                decisions.append(future)
            return decisions

    episodes = {e.task_id: e for e in rollout(specs(5), "count", Bad())}
    assert episodes["count/0002"].outcome == "fault"
    assert episodes["count/0002"].cause == ("infrastructure" if answer == "server down" else "policy")
    assert [e.outcome for e in episodes.values()].count("success") == 4


def test_slow_decisions_overlap() -> None:
    class Slow(Policy):
        name = "slow"
        most = 0

        def __init__(self) -> None:
            self.running = 0
            self.lock = threading.Lock()

        def submit(self, requests: Any) -> Any:
            futures = []
            for _ in requests:
                future: Future[Reply] = Future()
                threading.Thread(target=self.answer, args=(future,)).start()
                futures.append(future)
            return futures

        def answer(self, future: Future[Reply]) -> None:
            with self.lock:
                self.running += 1
                Slow.most = max(Slow.most, self.running)
            time.sleep(0.02)
            with self.lock:
                self.running -= 1
            future.set_result(Reply(text="up"))

    for name in ("serial", "threads", "processes"):
        Slow.most = 0
        backend = make_backend(name, 4)
        try:
            assert all(e.outcome == "success" for e in rollout(specs(8), "count", Slow(), backend=backend))
        finally:
            backend.close()
        assert Slow.most >= 3, name


@pytest.mark.parametrize("name", ["serial", "threads", "processes"])
def test_a_rollout_closed_early_leaves_the_back_end_fit_for_another(name: str) -> None:
    backend = make_backend(name, 3, limits=LIMITS)
    try:
        for _ in range(3):
            unfinished = rollout(
                specs(9, seed=1), "count", worlds.UpPolicy(), backend=backend, env_kwargs={"delay": 0.02}
            )
            next(unfinished)
            unfinished.close()  # type: ignore[attr-defined]
        plan = specs(6, seed=2)
        again = list(rollout(plan, "count", worlds.UpPolicy(), backend=backend))
    finally:
        backend.close()
    assert comparable(again) == comparable(list(rollout(plan, "count", worlds.UpPolicy())))


def test_forks_continue_from_a_snapshot() -> None:
    env = worlds.CountEnv(tasks="count/tasks")
    env.reset(seed=3, options={"task": "count/0001"})
    env.step("up")
    fork = EpisodeSpec(
        task_id="count/0001", split="test", seed=3, snapshot=env.snapshot(), parent_id="count/0001#3#0", fork_turn=1
    )
    (episode,) = rollout([fork], "count", worlds.UpPolicy())
    assert len(episode.turns) == 2
    assert episode.turns[0].observation.startswith("count is 1")
    assert episode.episode_id == "count/0001#3#0@1"


def test_a_bad_call_ends_the_run_with_its_message() -> None:
    with pytest.raises(UsageError, match="unknown task"):
        list(rollout([EpisodeSpec(task_id="nope", split="test")], "count", worlds.UpPolicy()))
    with pytest.raises(UsageError, match=r"unknown environment 'cuont'.*'count'"):
        list(rollout(specs(1), "cuont", worlds.UpPolicy()))
    with pytest.raises(UsageError, match="no policy for role 'agent'"):
        list(rollout(specs(1), "count", {"judge": worlds.UpPolicy()}))
    with pytest.raises(UsageError, match="unknown back end"):
        make_backend("proceses")
