"""What the trainer wastes: padding of its micro-batches, and what GiGPO's estimator adds to an iteration of GRPO.

    python -m benchmarks.waste [--model FOLDER]

Padding is counted on the samples of real iterations. The estimators are timed on the same trajectories; whole
iterations are timed by method, in turn, and compared by the turn, for the methods play different games.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.cold_start import keep_played, parser, reinforce, workplace  # sets the number of threads: before torch

# isort: split
from agentgym.baselines.core.batch import cut, make_batch
from agentgym.baselines.core.learner import minibatches
from agentgym.baselines.core.method import Method, make_method
from agentgym.baselines.core.sample import Sample, Trajectory
from agentgym.baselines.core.trainer import Trainer

ITERATIONS, ROUNDS, REPEATS = 3, 3, 5
PADDING, OVERHEAD = 0.05, 0.03  # goals
OPTIONS = {"group_size": 8, "step_cost": 0.005}


def run(method: str, model: str, out: Path, seed: int, played: list[list[Trajectory]]) -> list[tuple[float, int]]:
    """CPU seconds and turns of each iteration but the first; what was played goes into `played`."""
    marks: list[tuple[float, int]] = []

    def watch(line: dict[str, Any]) -> None:
        if line["kind"] == "train":
            marks.append((time.process_time(), line["env_steps"]))

    config = reinforce(model, method=method, seed=seed, iterations=1 + ITERATIONS, method_options=OPTIONS)
    trainer = Trainer(config, out, watch=watch)
    kept = keep_played(trainer)
    trainer.run()
    played += kept
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)]


def padding(samples: Sequence[Sample], minibatch: int, budget: int, packed: bool) -> float:
    """Share of padding in one pass over the samples."""
    area = tokens = 0
    for chosen in minibatches(samples, minibatch, np.random.default_rng(0)):
        for part in cut(chosen, budget, packed=packed):
            batch = make_batch(part, {}, packed=packed, everything=True)
            area += batch.input_ids.numel()
            tokens += sum(map(len, part))
    return 1 - tokens / area


def estimation(method: Method, played: Sequence[Sequence[Trajectory]]) -> float:
    """Mean over iterations of the least CPU seconds of some calls."""
    means = []
    for trajectories in played:
        seconds = []
        for _ in range(REPEATS):
            began = time.process_time()
            method.turn_advantages(trajectories)
            seconds.append(time.process_time() - began)
        means.append(min(seconds))
    return mean(means)


def verdict(share: float, goal: float) -> str:
    return f"{share:6.2%}   {'under' if share < goal else 'OVER'} {goal:.0%}"


def main() -> None:
    given = parser(__doc__).parse_args()
    with workplace(given.model) as (folder, model):
        times: dict[str, list[tuple[float, int]]] = {"grpo": [], "gigpo": []}
        played: dict[str, list[list[Trajectory]]] = {"grpo": [], "gigpo": []}
        for seed in range(ROUNDS):
            for name in times:
                times[name] += run(name, model, folder / f"{name} {seed}", seed, played[name])
        budget = reinforce(model).token_budget
    iterations = [[sample for each in group for sample in each.samples] for group in played["grpo"]]
    lengths = [len(sample) for samples in iterations for sample in samples]
    print(f"padding, token budget {budget}: {len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens")
    for minibatch in (64, 8):
        for packed in (False, True):
            share = mean(padding(samples, minibatch, budget, packed) for samples in iterations)
            print(f"minibatch {minibatch:2d} {'packed' if packed else 'rows':6s}  {verdict(share, PADDING)}")
    whole = mean(seconds for seconds, _ in times["grpo"])
    base = estimation(make_method("grpo", OPTIONS), played["grpo"])
    print(f"\nestimators alone; an iteration of GRPO takes {whole:.2f} CPU s, of which GRPO's {1000 * base:.2f} ms")
    for name, options in (("gigpo", {}), ("gigpo, similarity 0.9", {"similarity": 0.9})):
        own = estimation(make_method("gigpo", {**OPTIONS, **options}), played["grpo"])
        print(f"{name:22s} {1000 * own:8.2f} ms   {verdict((own - base) / whole, OVERHEAD)}")
    print("\nwhole iterations")
    for name, each in times.items():
        rates = [1000 * seconds / turns for seconds, turns in each]
        error = stdev(rates) / len(rates) ** 0.5
        print(f"{name:6s} {mean(s for s, _ in each):5.2f} CPU s   {mean(rates):.3f} +- {error:.3f} CPU ms a turn")
    ratio = [sum(s for s, _ in times[name]) / sum(t for _, t in times[name]) for name in ("grpo", "gigpo")]
    print(f"gigpo over grpo, by the turn: {verdict(ratio[1] / ratio[0] - 1, OVERHEAD)}")


if __name__ == "__main__":
    main()
