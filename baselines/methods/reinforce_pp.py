"""REINFORCE++: token rewards with a KL penalty, whitened over the whole batch (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import discounted_returns, whiten
from agentgym.baselines.core.method import Copy, Method, Services, Share, Weight, score
from agentgym.baselines.core.sample import Sample, Trajectory
from agentgym.baselines.methods.grpo import GRPOConfig, outcome_advantages


class ReinforcePPConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of REINFORCE++.

    Attributes:
        baseline: "group" takes the group's mean off each outcome first ("REINFORCE++-baseline").
        kl_reward: beta of the token reward -beta (lp_old - lp_ref); 0 keeps no reference for it.
        gamma: discount between tokens.
        ddof: of the standard deviation over all tokens of the batch.
        scale: of the group baseline: divide by the group's standard deviation too.
        stat_weighting, singleton: of the group baseline, see `GRPOConfig`.
    """

    baseline: Literal["none", "group"] = "none"
    kl_reward: Weight = 0.001
    gamma: Share = 1.0
    scale: bool = False


class ReinforcePP(Method):
    """REINFORCE with the tricks of PPO and without its critic."""

    card = Card(
        name="reinforce_pp",
        title="REINFORCE++",
        paper="REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models (2501.03262)",
        grade="A",
        source="the paper, and verl's estimator",
        families=("rlhf", "math"),
        hooks=("reward: KL a token", "scoring: reference", "normalisation: all tokens of the batch", "copy: reference"),
        differences=(
            "token rewards run over all turns of a trajectory, the outcome lies on its last token",
            "the weight of the KL reward is our choice",
        ),
    )
    Config = ReinforcePPConfig

    @property
    def copies(self) -> dict[str, Copy]:
        """The reference, for the KL reward and for a KL term."""
        return {"reference": Copy()} if self.config.kl_reward else super().copies

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Returns-to-go of the token rewards, whitened over all tokens of the batch."""
        config = self.config
        if config.kl_reward or config.kl_coefficient:
            score(trajectories, services, "reference_logp", "reference")
        if config.baseline == "group":
            outcomes = outcome_advantages(trajectories, config)
        else:
            outcomes = np.array([t.outcome for t in trajectories])
        samples = [sample for trajectory in trajectories for sample in trajectory.samples]
        parts = []
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            sizes = [sample.actions for sample in trajectory.samples]
            rewards = np.concatenate([self._charge(sample) for sample in trajectory.samples] or [np.zeros(0)])
            if len(rewards):
                rewards[-1] += outcome
            parts += np.split(discounted_returns(rewards, config.gamma), np.cumsum(sizes))[:-1]
        for sample, advantage in zip(samples, whiten(parts, ddof=config.ddof), strict=True):
            sample.advantage[sample.action_mask] = advantage

    def _charge(self, sample: Sample) -> NDArray[np.float64]:
        """-beta (lp_old - lp_ref) at each generated token."""
        if not self.config.kl_reward:
            return np.zeros(sample.actions)
        gap = (sample.behaviour_logp - sample.fields["reference_logp"])[sample.action_mask]
        return np.asarray(-self.config.kl_reward * gap, dtype=np.float64)


METHOD = ReinforcePP
