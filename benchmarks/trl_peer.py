"""TRL's GRPOTrainer set up as this package's trainer is, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.tasks import TaskDraw
from agentgym.episode import Episode
from agentgym.integrations.trl import make_rollout_func, reward_from_env, trajectory
from agentgym.policies._chat import Chat
from agentgym.policies._tokens import ChatTokens, TokenRecorder, load_tokenizer
from agentgym.policies.base import Decision, Policy, Request
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import SerialBackend

GROUP = 8
Play = Literal["our sampler", "model.generate"]


def make_trl(
    config: TrainConfig,
    out: Path,
    *,
    steps: int = 1,
    micro: int = 32,
    play: Play = "our sampler",
    observe: Callable[[Episode], None] | None = None,
) -> Any:
    """A GRPOTrainer with our settings: `micro` sequences a forward, `steps` optimiser steps for each batch played."""
    episodes = config.tasks_per_iteration * GROUP
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
        prompt: dict[str, Any] = {"system": "", "instructions": False, "admissible": False}
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
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(config.model),
        reward_funcs=reward_from_env,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
        processing_class=load_tokenizer(config.model),
        rollout_func=rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


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
