"""DAPO: asymmetric clipping, dynamic sampling, soft overlong penalty (Yu et al. 2025, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import overlong_penalty
from agentgym.baselines.core.method import Count, Group, Services, Weight, Whole
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.grpo import GRPO, GRPOConfig


class DAPOConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of DAPO.

    Attributes:
        clip_high: above `clip_low`, so that unlikely tokens can become likely.
        generation_batches: rounds of sampling an iteration, at most, until there are enough groups with signal.
        filter_by: what must differ within a group: the environment's rewards, the shaped ones, or success.
        overlong_length: L_max, generated tokens a trajectory; 0 for no penalty.
        overlong_cache: c, the tokens below L_max in which the penalty grows to overlong_weight.
        overlong_weight: greatest penalty.
    """

    clip_high: Weight = 0.28
    generation_batches: Count = 10
    filter_by: Literal["reward", "outcome", "success"] = "reward"
    overlong_length: Whole = 4096
    overlong_cache: Whole = 1024
    overlong_weight: Weight = 1.0


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling policy optimisation."""

    card = Card(
        name="dapo",
        title="DAPO",
        paper="DAPO: An Open-Source LLM Reinforcement Learning System at Scale (2503.14476)",
        grade="A",
        source="the paper, and verl's recipe",
        families=("math", "alfworld", "webshop"),
        hooks=("group key: task", "filter: dynamic sampling", "rewards: overlong", "ratio: asymmetric clip"),
        differences=(
            "the length that is penalised is the sum of the generated tokens of a trajectory",
            "groups are compared before shaping, so that a step cost does not make all of them count as informative",
        ),
    )
    Config = DAPOConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.refills = config.generation_batches - 1

    def rewards(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Takes the overlong penalty off the last turn's reward."""
        super().rewards(trajectories, services)
        config = self.config
        if not config.overlong_length:
            return
        for trajectory in trajectories:
            length = sum(sample.actions for sample in trajectory.samples)
            penalty = overlong_penalty(length, config.overlong_length, config.overlong_cache)
            trajectory.rewards[-1] += config.overlong_weight * penalty

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Groups whose trajectories did not all fare the same."""
        return [group for group in groups if len({self._fared(trajectory) for trajectory in group}) > 1]

    def _fared(self, trajectory: Trajectory) -> float:
        if self.config.filter_by == "success":
            return float(trajectory.success)
        if self.config.filter_by == "outcome":
            return trajectory.outcome
        return float(sum(turn.reward for turn in trajectory.turns))


METHOD = DAPO
