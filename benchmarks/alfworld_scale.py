"""ALFWorld at scale: episodes a second with 1 to 512 concurrent environments in two processes.

    python -m benchmarks.alfworld_scale

Real-size games, random policy, 50 turns an episode, the run log off. The rate should be flat or rise with the number
of environments, and an environment should cost less than 2 MB.
"""

from __future__ import annotations

import time
from pathlib import Path

from agentgym.policies.base import make_policy
from agentgym.registry import make_task_set
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import ProcessBackend, TimeLimits


def resident(pids: list[int]) -> float:
    """Resident memory of processes, in MB."""
    total = 0
    for pid in pids:
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return total / 1e6


def main() -> None:
    tasks = make_task_set("alfworld/generated")
    base: tuple[int, float] | None = None
    print(f"{'environments':>12} {'episodes/s':>11} {'steps/s':>9} {'workers MB':>11} {'MB per added environment':>25}")
    for concurrent in (1, 2, 4, 64, 512):
        workers = min(2, concurrent)
        backend = ProcessBackend(workers, concurrent // workers, TimeLimits())
        try:
            n = max(120, 2 * concurrent)
            specs = [EpisodeSpec(task_id=tasks.at("train", i).id, split="train") for i in range(n)]
            list(rollout(specs[:workers], "alfworld", make_policy("random"), backend=backend))
            begun = time.perf_counter()
            steps = sum(len(e.turns) for e in rollout(specs, "alfworld", make_policy("random"), backend=backend))
            seconds = time.perf_counter() - begun
            memory = resident([worker.process.pid for worker in backend.workers])
        finally:
            backend.close()
        added = "" if base is None else f"{(memory - base[1]) / (concurrent - base[0]):.3f}"
        if concurrent == 2:
            base = (concurrent, memory)
        print(f"{concurrent:12} {n / seconds:11.1f} {steps / seconds:9,.0f} {memory:11.1f} {added:>25}")


if __name__ == "__main__":
    main()
