"""One GRPO iteration, rollout and update: this package's trainer against TRL's GRPOTrainer.

    python -m benchmarks.trainer [--model FOLDER] [--steps 1|2]

Same cold start, environment, number of episodes (16 tasks, 8 each), token limits, optimiser and number of optimiser
steps; one thread; in one process, in turn. TRL plays its episodes in two ways:

- "our sampler": `agentgym.integrations.trl.make_rollout_func`, whose sampler keeps the cache of each episode, so that
  only the trainers differ;
- "model.generate": all waiting episodes in one padded batch, each history encoded again in each turn, which is how a
  rollout_func is commonly written.

Then the loss alone, forward and backward on the same batch.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.cold_start import parser, reinforce, workplace  # sets the number of threads: before torch

# isort: split
from transformers import TrainerCallback

from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.trainer import Trainer
from benchmarks.loss import time_losses
from benchmarks.trl_peer import GROUP, Play, make_trl

ITERATIONS, ROUNDS = 3, 2  # timed iterations a round, behind one to warm up


class Clock:
    """CPU and wall seconds between the ends of iterations, and the turns played in each."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.turns: list[int] = []
        self._turns = 0
        self._last: tuple[float, float] | None = None

    def count(self, turns: int) -> None:
        """Adds turns to the iteration."""
        self._turns += turns

    def tick(self) -> None:
        """An iteration has ended; the first one of a round only starts the clock."""
        now = time.process_time(), time.perf_counter()
        if self._last is not None:
            self.cpu.append(now[0] - self._last[0])
            self.wall.append(now[1] - self._last[1])
            self.turns.append(self._turns)
        self._last, self._turns = now, 0

    def pause(self) -> None:
        """The round is over."""
        self._last = None


def run_ours(clock: Clock, config: TrainConfig, out: Path) -> None:
    """One round of this package's trainer."""
    before = 0

    def watch(line: dict[str, Any]) -> None:
        nonlocal before
        if line["kind"] == "train":
            clock.count(line["env_steps"] - before)
            before = line["env_steps"]
            clock.tick()

    Trainer(config, out, watch=watch).run()
    clock.pause()


def run_trl(clock: Clock, config: TrainConfig, out: Path, steps: int, play: Play, micro: int) -> None:
    """One round of GRPOTrainer."""

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % steps == 0:
                clock.tick()

    trainer = make_trl(config, out, steps=steps, micro=micro, play=play, observe=lambda e: clock.count(len(e.turns)))
    trainer.add_callback(Ticks())
    trainer.train()
    clock.pause()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, choices=(1, 2), default=1, help="optimiser steps an iteration")
    arguments.add_argument("--micro", type=int, default=32, help="TRL's sequences a forward")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    with workplace(given.model) as (folder, model):
        config = reinforce(
            model,
            iterations=1 + ITERATIONS,
            minibatch=64 if given.steps == 2 else 0,
            method_options={"group_size": GROUP, "step_cost": 0.0},
        )
        time_iterations(config, folder, given.steps, given.micro)
        print()
        time_losses(config, folder)


def time_iterations(config: TrainConfig, folder: Path, steps: int, micro: int) -> None:
    """Runs the three in turn and prints their medians."""
    plays: tuple[Play, ...] = get_args(Play)
    ours, theirs = Clock(), {play: Clock() for play in plays}
    for number in range(ROUNDS):
        run_ours(ours, config, folder / f"ours {number}")
        for play, clock in theirs.items():
            run_trl(clock, config, folder / f"{play} {number}", steps, play, micro)
    print(f"{config.tasks_per_iteration} tasks x {GROUP}, {steps} optimiser step(s); medians of {ROUNDS * ITERATIONS}")
    print(f"{'an iteration of':22s} CPU s   wall s   turns   CPU ms a turn   CPU, to ours")
    for name, clock in {"ours": ours, **{f"TRL, {play}": clock for play, clock in theirs.items()}}.items():
        cpu, ratio = median(clock.cpu), median(clock.cpu) / median(ours.cpu)
        rate = 1000 * sum(clock.cpu) / sum(clock.turns)
        print(
            f"{name:22s} {cpu:5.2f}   {median(clock.wall):6.2f}   {median(clock.turns):5.0f}   {rate:13.2f}   "
            f"{ratio:12.2f}"
        )


if __name__ == "__main__":
    main()
