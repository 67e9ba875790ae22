"""Forward and backward of the GRPO loss of 64 episodes: ours against TRL's on the same batch; CPU seconds, one thread.

python -m benchmarks.loss [--model FOLDER]
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.cold_start import keep_played, parser, reinforce, workplace  # sets the number of threads: before torch

# isort: split
import torch
from transformers import AutoModelForCausalLM

from agentgym.baselines.core.actor import Actor
from agentgym.baselines.core.batch import cut, make_batch, normalisers
from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.method import make_method
from agentgym.baselines.core.sample import Sample
from agentgym.baselines.core.trainer import Trainer
from benchmarks.trl_peer import make_trl

EPISODES, REPEATS = 64, 7


def play_batch(config: TrainConfig, out: Path, size: int) -> list[Sample]:
    """Samples of an iteration's first episodes, with advantages."""
    trainer = Trainer(config, out)
    played = keep_played(trainer)
    trainer.run()
    return trainer.method.samples(played[0][:size])


def time_losses(config: TrainConfig, folder: Path) -> None:
    """Forward and backward of 64 episodes' loss; building our tensors is counted, building TRL's is not."""
    samples = play_batch(msgspec.structs.replace(config, iterations=1), folder / "batch", EPISODES)
    term = make_method("grpo").losses()
    model = AutoModelForCausalLM.from_pretrained(config.model).train()
    actor = Actor(model)

    def ours() -> None:
        model.zero_grad()
        weights = normalisers(samples, term)
        for part in cut(samples, config.token_budget):
            batch = make_batch(part, weights)
            outputs = actor(batch, entropy=False, keep_logits=False)
            (batch.weights["policy"] * term[0].loss(batch, outputs)).sum().backward()

    def theirs(trainer: Any, inputs: list[dict[str, Any]]) -> None:
        trainer.model.zero_grad()
        for part in inputs:
            trainer.compute_loss(trainer.model, part).backward()

    results: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], None]] = {"ours": ours}
    for micro in (4, 8, 16, 32, 64):
        trainer = make_trl(config, folder / f"loss{micro}", micro=micro)
        trainer.current_gradient_accumulation_steps = EPISODES // micro
        trainer.args.steps_per_generation = EPISODES // micro
        inputs = trl_inputs(samples, micro)
        trainer.model.train()
        runs[f"TRL, {micro} a forward"] = functools.partial(theirs, trainer, inputs)
    for run in runs.values():
        run()
    for _ in range(REPEATS):
        for name, run in runs.items():
            began = time.process_time()
            run()
            results.setdefault(name, []).append(time.process_time() - began)
    tokens = sum(map(len, samples))
    longest = max(map(len, samples))
    print(f"loss alone, forward and backward: {EPISODES} episodes, {tokens} tokens, the longest {longest}")
    print(f"{'':22s} CPU s   to ours")
    for name, seconds in results.items():
        print(f"{name:22s} {median(seconds):5.2f}   {median(seconds) / median(results['ours']):7.2f}")


def trl_inputs(samples: Sequence[Sample], micro: int) -> list[dict[str, Any]]:
    """The batch as GRPOTrainer makes it: padded to its longest prompt and completion, then cut."""
    starts = [int(np.argmax(sample.action_mask)) for sample in samples]
    before, after = max(starts), max(len(s) - start for s, start in zip(samples, starts, strict=True))
    shape = len(samples), before + after
    ids, mask, own = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        place = slice(before - start, before - start + len(sample))
        ids[row, place], mask[row, place], own[row, place] = sample.input_ids, 1, sample.action_mask
    advantages = [float(sample.advantage[sample.action_mask][0]) for sample in samples]
    whole = {
        "prompt_ids": torch.from_numpy(ids[:, :before]),
        "prompt_mask": torch.from_numpy(mask[:, :before]),
        "completion_ids": torch.from_numpy(ids[:, before:]),
        "completion_mask": torch.from_numpy(mask[:, before:]),
        "tool_mask": torch.from_numpy(own[:, before:]),
        "advantages": torch.tensor(advantages),
    }
    total = torch.tensor(own.sum())
    parts = range(0, len(samples), micro)
    return [{**{name: v[i : i + micro] for name, v in whole.items()}, "num_items_in_batch": total} for i in parts]


def main() -> None:
    given = parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    with workplace(given.model) as (folder, model):
        time_losses(reinforce(model, iterations=1), folder)


if __name__ == "__main__":
    main()
