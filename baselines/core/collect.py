"""Rollouts for training: the policy with its tokens recorded, or the expert as if a model had said its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from agentgym.baselines.core.config import TrainConfig
from agentgym.episode import Episode
from agentgym.errors import UsageError
from agentgym.policies._chat import Chat, PromptOptions
from agentgym.policies._tokens import ChatTokens, TokenRecorder
from agentgym.policies.base import Decision, Policy, Reply, Request
from agentgym.policies.hf import HFOptions, HFPolicy
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import Backend, make_backend


class DemonstrationPolicy(Policy):
    """The environment's expert, recorded as token ids in the policy's chat format.

    Args:
        tokenizer: of the model that will imitate it.
        prompt: how observations become messages.
        noise: share of turns with a random admissible command instead; their usage says {"noise": 1}.
    """

    name = "demonstrations"
    needs = frozenset({"expert"})
    gather = True

    def __init__(self, tokenizer: Any, prompt: PromptOptions, noise: float = 0.0) -> None:
        self._recorder = TokenRecorder(Chat(prompt.config()), ChatTokens(tokenizer))
        self._noise = noise

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """The expert's action for each."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Reply:
        if request.hint is None:
            raise UsageError(f"the expert knows no action in {request.context.episode_id}; choose tasks that it solves")
        command, usage = request.hint, {}
        admissible = request.info["admissible"]
        if self._noise and admissible and request.rng.random() < self._noise:
            command, usage = admissible[request.rng.integers(len(admissible))], {"noise": 1.0}
        prompt = self._recorder.prepare(request)
        ids = self._recorder.tokens.answer(request.render(command))
        return self._recorder.reply(prompt, ids, np.zeros(len(ids), np.float32), usage=usage)

    def finish(self, episode_id: str) -> None:
        """Forgets the episode."""
        self._recorder.finish(episode_id)


class ContextPolicy(Policy):
    """Puts a text behind the system prompt of each episode, by the episode's id.

    Args:
        inner: who decides.
        contexts: episode id -> text.
    """

    def __init__(self, inner: Policy, contexts: dict[str, str]) -> None:
        self.name, self.needs, self.gather = inner.name, inner.needs, inner.gather
        self._inner = inner
        self._contexts = contexts

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """The inner policy's decisions under the longer prompts."""
        return self._inner.submit([self._extend(request) for request in requests])

    def _extend(self, request: Request) -> Request:
        text = self._contexts.get(request.context.episode_id)
        if not text:
            return request
        context = msgspec.structs.replace(request.context, addition=text)
        return msgspec.structs.replace(request, context=context)

    def finish(self, episode_id: str) -> None:
        """Forgets the episode."""
        self._inner.finish(episode_id)

    def describe(self) -> dict[str, Any]:
        """As the inner policy."""
        return self._inner.describe()


def hf_policy(config: TrainConfig, model: Any, tokenizer: Any, *, greedy: bool = False) -> HFPolicy:
    """The trained model as a policy that samples at the training temperature, or takes the likeliest tokens."""
    options = HFOptions(
        **msgspec.structs.asdict(config.prompt),
        max_new_tokens=config.max_new_tokens,
        max_context=config.max_context,
        temperature=0.0 if greedy else config.temperature,
        batch_size=config.slots,
    )
    return HFPolicy(model, tokenizer, options)


class Collector:
    """Plays episodes for a training run; keeps the environments between calls.

    Args:
        config: of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._backend: Backend = make_backend(
            config.backend,
            config.slots if config.backend == "serial" else config.workers,
            envs_per_worker=config.envs_per_worker,
        )

    def play(
        self,
        specs: Iterable[EpisodeSpec],
        policy: Policy | dict[str, Policy],
        *,
        contexts: dict[str, str] | None = None,
        observe: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """Plays specs and returns every attempt, faults too, in the order of the specs.

        Args:
            specs: what to play.
            policy: who plays, or one a role.
            contexts: texts added to the system prompts, by episode id.
            observe: told every attempt when it ends.
        """
        wanted = list(specs)
        order = {spec.episode_id: place for place, spec in enumerate(wanted)}
        if contexts:
            roles = policy if isinstance(policy, dict) else {"*": policy}
            policy = {role: ContextPolicy(inner, contexts) for role, inner in roles.items()}
        episodes = []
        for episode in rollout(
            wanted,
            self._config.env,
            policy,
            env_kwargs=self._config.env_kwargs,
            backend=self._backend,
            retries=self._config.retries,
        ):
            episodes.append(episode)
            if observe is not None:
                observe(episode)
        # The order of ending depends on the machine; training must not.
        return sorted(episodes, key=lambda episode: (order[episode.episode_id], episode.attempt))

    def close(self) -> None:
        """Ends the workers."""
        self._backend.close()
