"""GSPO: one importance ratio a sequence instead of one a token (Zheng et al. 2025, arXiv 2507.18071)."""

from __future__ import annotations

from typing import Literal

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import Aggregation, LossTerm, clipped_policy_gradient
from agentgym.baselines.core.method import Weight
from agentgym.baselines.methods.grpo import GRPO, GRPOConfig


class GSPOConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of GSPO.

    Attributes:
        clip_low, clip_high: far smaller than those of token ratios, as s_i is a geometric mean.
        aggregation: mean over sequences of the mean over tokens.
        level: what shares a ratio: a whole sequence, or the tokens of each turn.
    """

    clip_low: Weight = 3e-4
    clip_high: Weight = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"
    level: Literal["sequence", "turn"] = "sequence"


class GSPO(GRPO):
    """Group sequence policy optimisation."""

    card = Card(
        name="gspo",
        title="GSPO",
        paper="Group Sequence Policy Optimization (2507.18071)",
        grade="A",
        source="the paper, and verl's loss",
        families=("math", "code"),
        hooks=("group key: task", "ratio: sequence", "loss aggregation: seq-mean-token-mean"),
        differences=("with prompts made afresh each turn, a sequence is a turn's sample, as in verl-agent",),
    )
    Config = GSPOConfig

    def losses(self) -> list[LossTerm]:
        """The policy gradient with s_i = exp(mean_t(lp - lp_old)), whose gradient goes through each token."""
        config = self.config
        policy = clipped_policy_gradient(
            config.clip_low,
            config.clip_high,
            level=config.level,
            aggregation=config.aggregation,
            max_length=config.max_length,
        )
        return [policy, *super().losses()[1:]]


METHOD = GSPO
