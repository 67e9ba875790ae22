"""Playing ahead of the updates: iteration i + k is played by the policy of iteration i while i is trained.

One thread plays with a model of its own; each job brings a copy of the trained parameters. What is played by which
version depends on the iteration alone, so a run is reproducible. A run that is continued plays its first k iterations
with the weights of the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from agentgym.baselines.core.collect import Collector
from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.learner import Learner
from agentgym.baselines.core.models import trainable
from agentgym.baselines.core.serving import make_sampler, publish
from agentgym.episode import Episode
from agentgym.policies.base import Policy
from agentgym.rollout import EpisodeSpec

Plan = Callable[[int], tuple[list[EpisodeSpec], dict[str, str]]]


class Ahead:
    """Episodes of iterations to come.

    Args:
        config: of the run; `staleness` is how far ahead.
        learners: whose parameters are copied.
        plan: iteration -> what this process plays in it, with texts for the system prompts.
        autocast: the precision that samples, as it trains.
    """

    def __init__(
        self,
        config: TrainConfig,
        learners: Mapping[str, Learner],
        plan: Plan,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._config = config
        self._learners = learners
        self._plan = plan
        self._autocast = autocast
        self._collector = Collector(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="play-ahead")
        self._models = {name: copy.deepcopy(learner.plain.lm) for name, learner in learners.items()}
        by_id = {
            name: make_sampler(config, self._models[name], learner.tokenizer) for name, learner in learners.items()
        }
        self._samplers = by_id
        self._roles: dict[str, Policy] = {
            "*": by_id["policy"],
            **{role: by_id[name] for role, name in config.policies.items()},
        }
        self._jobs: dict[int, Future[list[Episode]]] = {}

    def take(self, iteration: int) -> list[Episode]:
        """The episodes of an iteration; starts those up to `staleness` iterations later with today's weights."""
        snapshot = {
            name: {key: value.detach().clone() for key, value in trainable(learner.plain.lm).items()}
            for name, learner in self._learners.items()
        }
        for later in range(iteration, min(iteration + self._config.staleness, self._config.iterations - 1) + 1):
            if later not in self._jobs:
                specs, contexts = self._plan(later)
                self._jobs[later] = self._thread.submit(self._play, snapshot, iteration, specs, contexts)
        return self._jobs.pop(iteration).result()

    def _play(
        self,
        snapshot: Mapping[str, Mapping[str, Tensor]],
        version: int,
        specs: list[EpisodeSpec],
        contexts: dict[str, str],
    ) -> list[Episode]:
        for name, values in snapshot.items():
            for key, parameter in trainable(self._models[name]).items():
                parameter.data.copy_(values[key])
            publish(self._samplers[name], version)
        with self._autocast():
            return self._collector.play(specs, self._roles, contexts=contexts)

    def close(self) -> None:
        """Waits for what is being played, and lets go."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._collector.close()


def staleness_of(episodes: list[Episode], iteration: int) -> dict[str, Any]:
    """How many iterations the weights were behind that sampled these episodes: mean and greatest."""
    behind = [iteration - turn.policy_version for episode in episodes for turn in episode.turns if turn.arrays]
    return {"staleness": sum(behind) / len(behind), "staleness_max": max(behind)} if behind else {}
