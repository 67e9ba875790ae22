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
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cold_start import parser, reinforce, workplace  # sets the number of threads: before torch

# isort: split
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from agentgym.baselines.core.actor import Actor
from agentgym.baselines.core.batch import cut, make_batch, normalisers
from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.method import make_method
from agentgym.baselines.core.sample import Sample
from agentgym.baselines.core.tasks import TaskDraw
from agentgym.baselines.core.trainer import Trainer
from agentgym.episode import Episode
from agentgym.integrations.trl import make_rollout_func, reward_from_env, trajectory
from agentgym.policies._chat import Chat
from agentgym.policies._tokens import ChatTokens, TokenRecorder, load_tokenizer
from agentgym.policies.base import Decision, Policy, Request
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import SerialBackend

ITERATIONS, ROUNDS = 3, 3  # timed iterations a round, behind one to warm up
GROUP = 8


class Clock:
    """CPU and wall seconds between the ends of iterations, and the turns played in each."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.turns: list[int] = []
        self._played = 0
        self._last: tuple[float, float] | None = None

    def played(self, episode: Episode) -> None:
        """Counts an episode's turns."""
        self._played += len(episode.turns)

    def tick(self) -> None:
        """An iteration has ended; the first one of a round only starts the clock."""
        now = time.process_time(), time.perf_counter()
        if self._last is not None:
            self.cpu.append(now[0] - self._last[0])
            self.wall.append(now[1] - self._last[1])
            self.turns.append(self._played)
        self._last, self._played = now, 0

    def pause(self) -> None:
        """The round is over."""
        self._last = None


def run_ours(clock: Clock, config: TrainConfig, out: Path) -> None:
    """One round of this package's trainer."""
    before = 0

    def watch(line: dict[str, Any]) -> None:
        nonlocal before
        if line["kind"] == "train":
            clock._played, before = line["env_steps"] - before, line["env_steps"]
            clock.tick()

    Trainer(config, out, watch=watch).run()
    clock.pause()


def run_trl(clock: Clock, config: TrainConfig, out: Path, steps: int, play: str, micro: int) -> None:
    """One round of GRPOTrainer."""

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % steps == 0:
                clock.tick()

    trainer = make_trl(config, out, steps=steps, micro=micro, play=play, observe=clock.played)
    trainer.add_callback(Ticks())
    trainer.train()
    clock.pause()


def make_trl(
    config: TrainConfig,
    out: Path,
    *,
    steps: int = 1,
    micro: int = 32,
    play: str = "our sampler",
    observe: Callable[[Episode], None] | None = None,
) -> Any:
    """A GRPOTrainer with our settings: `micro` sequences a forward, `steps` optimiser steps for each batch played."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    episodes = config.tasks_per_iteration * GROUP
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = GRPOConfig(
            output_dir=str(out),
            max_steps=config.iterations * steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=episodes // micro // steps,
            steps_per_generation=episodes // micro,
            num_generations=GROUP,
            loss_type="dapo",
            beta=0.0,
            learning_rate=config.optimiser.lr,
            lr_scheduler_type="constant",
            adam_beta2=config.optimiser.beta2,
            max_grad_norm=config.optimiser.clip,
            temperature=config.temperature,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
        )
        tasks = TaskDraw(config).draw(np.random.default_rng(0), 4 * config.iterations * config.tasks_per_iteration)
        backend = SerialBackend(episodes)  # lives over all iterations, as in our trainer
        if play == "our sampler":
            prompt = {"system": "", "instructions": False, "admissible": False}
            rollout_func = make_rollout_func(
                config.env,
                env_kwargs=config.env_kwargs,
                max_new_tokens=config.max_new_tokens,
                batch_size=config.slots,
                backend=backend,
                on_episode=observe,
                **prompt,
            )
        else:
            rollout_func = generating(config, backend, observe)
        return GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(config.model),
            reward_funcs=reward_from_env,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
            processing_class=load_tokenizer(config.model),
            rollout_func=rollout_func,
        )


class Generating(Policy):
    """Answers all waiting episodes with one call of `generate` on their whole histories."""

    name = "generate"
    gather = True

    def __init__(self, model: Any, tokenizer: Any, config: TrainConfig) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._recorder = TokenRecorder(Chat(config.prompt.config()), ChatTokens(tokenizer))

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """Samples."""
        prompts = [self._recorder.prepare(request) for request in requests]
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, width - len(prompt.ids) :] = 1
        with torch.no_grad():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                temperature=self._config.temperature,
                max_new_tokens=self._config.max_new_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
                eos_token_id=self._tokenizer.eos_token_id,
            )
        return [
            self._recorder.reply(prompt, answer, np.zeros(len(answer), np.float32))
            for prompt, answer in zip(prompts, map(self._until_end, out[:, width:].tolist()), strict=True)
        ]

    def _until_end(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    def finish(self, episode_id: str) -> None:
        """Forgets the episode."""
        self._recorder.finish(episode_id)


def generating(config: TrainConfig, backend: Any, observe: Callable[[Episode], None] | None) -> Any:
    """A rollout_func that samples with `model.generate`."""
    played = 0

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        nonlocal played
        specs = [EpisodeSpec(task_id=task, repeat=played + place) for place, task in enumerate(prompts)]
        played += len(specs)
        model = trainer.model
        model.eval()
        policy = Generating(model, trainer.processing_class, config)
        episodes = {}
        for episode in rollout(specs, config.env, policy, env_kwargs=config.env_kwargs, backend=backend):
            episodes[episode.episode_id] = episode
            if observe is not None:
                observe(episode)
        model.train()
        done = [episodes[spec.episode_id] for spec in specs]
        tokens = [trajectory(episode) for episode in done]
        return {
            "prompt_ids": [each.prompt_ids for each in tokens],
            "completion_ids": [each.completion_ids for each in tokens],
            "logprobs": [each.logprobs for each in tokens],
            "env_mask": [each.mask for each in tokens],
            "env_reward": [episode.total_reward for episode in done],
        }

    return rollout_func


def play_batch(config: TrainConfig, out: Path, size: int) -> list[Sample]:
    """Samples of an iteration, with advantages, at most `size`."""
    from agentgym.baselines.core.services import TrainerServices

    trainer = Trainer(config, out)
    services = TrainerServices(trainer.learners, None, np.random.default_rng(0))
    _, groups, _ = trainer._collect(services)
    chosen = [each for group in groups for each in group][:size]
    trainer.method.advantages(chosen, services)
    trainer._close()
    return trainer.method.samples(chosen)


def time_losses(config: TrainConfig, folder: Path) -> None:
    """Forward and backward of 64 episodes' loss; building our tensors is counted, building TRL's is not."""
    samples = play_batch(config, folder / "batch", 64)
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

    results = {}
    runs: dict[str, Callable[[], None]] = {"ours": ours}
    for micro in (4, 8, 16, 32, 64):
        trainer = make_trl(config, folder / f"loss{micro}", micro=micro)
        trainer.current_gradient_accumulation_steps = 64 // micro
        trainer.args.steps_per_generation = 64 // micro
        inputs = trl_inputs(samples, micro)
        trainer.model.train()
        runs[f"TRL, {micro} a forward"] = lambda trainer=trainer, inputs=inputs: theirs(trainer, inputs)
    for run in runs.values():
        run()
    for _ in range(7):
        for name, run in runs.items():
            began = time.process_time()
            run()
            results.setdefault(name, []).append(time.process_time() - began)
    tokens = sum(map(len, samples))
    longest = max(map(len, samples))
    print(f"\nloss alone, forward and backward: 64 episodes, {tokens} tokens, the longest {longest}")
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
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, choices=(1, 2), default=1, help="optimiser steps an iteration")
    arguments.add_argument("--micro", type=int, default=16, help="TRL's sequences a forward (8 to 64; 16 is fastest)")
    arguments.add_argument("--loss", action="store_true", help="the loss alone")
    given = arguments.parse_args()
    with workplace(given.model) as (folder, model):
        episodes = 128
        minibatch = 0 if given.steps == 1 else episodes // given.steps
        config = reinforce(
            model, iterations=1 + ITERATIONS, minibatch=minibatch, method_options={"group_size": GROUP, "step_cost": 0}
        )
        if not given.loss:
            time_iterations(config, folder, given.steps, given.micro)
        time_losses(config, folder)


def time_iterations(config: TrainConfig, folder: Path, steps: int, micro: int) -> None:
    """Runs the three in turn and prints their medians."""
    clocks = {"ours": Clock(), "TRL, our sampler": Clock(), "TRL, model.generate": Clock()}
    for number in range(ROUNDS):
        for name, clock in clocks.items():
            out = folder / f"{number} {name}"
            if name == "ours":
                run_ours(clock, config, out)
            else:
                run_trl(clock, config, out, steps, name.removeprefix("TRL, "), micro)
            print(f"round {number + 1}, {name}: {', '.join(f'{s:.1f}' for s in clock.cpu[-ITERATIONS:])} CPU s")
    print(f"\n{config.tasks_per_iteration} tasks x {GROUP}, {steps} optimiser step(s): median of {ROUNDS * ITERATIONS}")
    print(f"{'an iteration of':22s} CPU s   wall s   turns   CPU ms a turn   CPU, to ours")
    base = median(clocks["ours"].cpu)
    for name, clock in clocks.items():
        cpu, turns = median(clock.cpu), median(clock.turns)
        rate = 1000 * sum(clock.cpu) / sum(clock.turns)
        print(f"{name:22s} {cpu:5.2f}   {median(clock.wall):6.2f}   {turns:5.0f}   {rate:13.2f}   {cpu / base:12.2f}")


if __name__ == "__main__":
    main()
