"""Who samples during training: the model in this process, or a vLLM server that is given the new weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentgym.baselines.core.collect import hf_policy
from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.weight_push import WeightPush
from agentgym.errors import UsageError
from agentgym.policies.base import Decision, Policy, Request
from agentgym.policies.hf import HFPolicy
from agentgym.policies.vllm import VLLMOptions, VLLMPolicy


class AdapterPolicy(Policy):
    """Makes an adapter the active one whenever its policy samples; several share one model.

    Args:
        inner: samples from the shared model.
        lm: that model.
        adapter: name of the adapter.
    """

    def __init__(self, inner: HFPolicy, lm: Any, adapter: str) -> None:
        self.name, self.needs, self.gather = inner.name, inner.needs, inner.gather
        self.inner = inner
        self._lm = lm
        self._adapter = adapter

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """The inner policy's decisions with this adapter."""
        self._lm.set_adapter(self._adapter)
        return self.inner.submit(requests)

    def finish(self, episode_id: str) -> None:
        """Forgets the episode."""
        self.inner.finish(episode_id)

    def describe(self) -> dict[str, Any]:
        """As the inner policy, with the adapter."""
        return {**self.inner.describe(), "adapter": self._adapter}


class ServedPolicy(VLLMPolicy):
    """A vLLM server's model, with the way its weights are renewed.

    Args:
        config: of the run.
        lm: the model whose weights the server gets.
        tokenizer: its tokenizer.
        greedy: take the likeliest tokens.
    """

    def __init__(self, config: TrainConfig, lm: Any, tokenizer: Any, *, greedy: bool) -> None:
        server = config.server
        if not server.model or not server.weights:
            raise UsageError("[server] needs model (its name at the server) and weights (a folder both can read)")
        options = VLLMOptions(
            **msgspec.structs.asdict(config.prompt),
            base_url=server.base_url,
            temperature=0.0 if greedy else config.temperature,
            logprobs_mode="processed_logprobs",
            max_tokens=config.max_new_tokens,
            max_context=config.max_context,
            max_in_flight=server.max_concurrency,
        )
        super().__init__(server.model, tokenizer, options)
        self.lm = lm
        self.pusher = WeightPush(server.base_url, Path(server.weights), server.model, policy=self)


def make_sampler(config: TrainConfig, lm: Any, tokenizer: Any, *, adapter: str = "", greedy: bool = False) -> Policy:
    """The policy that plays with a model.

    Args:
        config: of the run.
        lm, tokenizer: the model in this process.
        adapter: name of its adapter, where several share it.
        greedy: take the likeliest tokens instead of sampling.
    """
    if config.server.base_url:
        if adapter:
            raise UsageError("a server holds one set of weights: generate in this process to train several adapters")
        return ServedPolicy(config, lm, tokenizer, greedy=greedy)
    policy = hf_policy(config, lm, tokenizer, greedy=greedy)
    return AdapterPolicy(policy, lm, adapter) if adapter else policy


def publish(policy: Policy, version: int) -> None:
    """Makes a sampler use the weights as they are now, which have seen `version` iterations."""
    if isinstance(policy, AdapterPolicy):
        policy = policy.inner
    if isinstance(policy, ServedPolicy):
        policy.pusher.push(policy.lm, version)  # sets the version too
    elif isinstance(policy, HFPolicy):
        policy.version = version
