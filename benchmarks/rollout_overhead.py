"""What the runner costs: a trivial environment through agentgym and through Gymnasium, measured in one run.

    python -m benchmarks.rollout_overhead

1. one environment: steps a CPU second of `agentgym.make`, and of the whole runner, against `gymnasium.make`;
2. eight environments in processes, faults isolated, against AsyncVectorEnv(shared_memory=False): steps a wall second;
3. the whole runner with the run log written, fsync in groups: steps a CPU second.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium

import agentgym
from agentgym.episode import RunConfig, RunWriter, TaskSetRecord
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import SerialBackend, make_backend
from benchmarks.trivial import TASKS, ConstantPolicy

EPISODES = 2000
TURNS = 10


def specs(n: int = EPISODES) -> list[EpisodeSpec]:
    return [EpisodeSpec(task_id=f"trivial/{i % TASKS}", split="test") for i in range(n)]


def best(measure: Callable[[], float], runs: int = 5) -> float:
    return max(measure() for _ in range(runs))


def loop(env: gymnasium.Env[str, str]) -> float:
    begun = time.process_time()
    for episode in range(EPISODES):
        env.reset(seed=episode)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step("on")
            ended = terminated or truncated
    return EPISODES * TURNS / (time.process_time() - begun)


def runner(slots: int, recorded: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        record = TaskSetRecord(name="trivial/tasks", version="1", digest="")
        config = RunConfig(env="bench/Trivial-v0", task_set=record, split="test")
        writer = RunWriter(Path(folder) / "run", config) if recorded else None
        begun = time.process_time()
        steps = 0
        for episode in rollout(specs(), "trivial", ConstantPolicy(), backend=SerialBackend(slots)):
            steps += len(episode.turns)
            if writer is not None:
                writer.append(episode)
        if writer is not None:
            writer.close()
        return steps / (time.process_time() - begun)


def processes(workers: int, envs_per_worker: int) -> float:
    backend = make_backend("processes", workers, envs_per_worker=envs_per_worker)
    try:
        list(rollout(specs(16), "trivial", ConstantPolicy(), backend=backend))  # workers are up
        begun = time.perf_counter()
        steps = sum(len(e.turns) for e in rollout(specs(), "trivial", ConstantPolicy(), backend=backend))
        return steps / (time.perf_counter() - begun)
    finally:
        backend.close()


def async_vector() -> float:
    def make() -> gymnasium.Env[str, str]:
        import benchmarks.trivial  # noqa: F401 - registers the id in the child

        return gymnasium.make("bench/Trivial-v0", split="test")

    env = gymnasium.vector.AsyncVectorEnv([make] * 8, shared_memory=False)
    try:
        env.reset(seed=0)
        actions = ("on",) * 8
        for _ in range(20):
            env.step(actions)
        begun = time.perf_counter()
        n = EPISODES * TURNS // 8
        for _ in itertools.repeat(None, n):
            env.step(actions)
        return n * 8 * TURNS / (TURNS + 1) / (time.perf_counter() - begun)  # one of eleven calls only resets
    finally:
        env.close()


def show(what: str, ours: float, theirs: float | None, unit: str) -> None:
    ratio = "" if theirs is None else f"   reference {theirs:10,.0f}   ratio {ours / theirs:5.2f}"
    print(f"{what:58} {ours:10,.0f} {unit}{ratio}")


def main() -> None:
    plain = best(lambda: loop(gymnasium.make("bench/Trivial-v0", split="test")))
    show(
        "one environment, agentgym.make",
        best(lambda: loop(agentgym.make("trivial", split="test"))),
        plain,
        "steps/CPU s",
    )
    show("one environment, whole runner, one slot", best(lambda: runner(1, False)), plain, "steps/CPU s")
    reference = best(async_vector, 3)
    show("8 environments, 8 processes", best(lambda: processes(8, 1), 3), reference, "steps/s    ")
    show("8 environments, 2 processes of 4", best(lambda: processes(2, 4), 3), reference, "steps/s    ")
    show("whole runner, 8 slots", best(lambda: runner(8, False)), None, "steps/CPU s")
    show("whole runner and run log, 8 slots (goal 100,000)", best(lambda: runner(8, True)), None, "steps/CPU s")


if __name__ == "__main__":
    main()
