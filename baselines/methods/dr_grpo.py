"""Dr.GRPO: GRPO without the two divisions that bias it (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import Aggregation
from agentgym.baselines.methods.grpo import GRPO, GRPOConfig


class DrGRPOConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of Dr.GRPO.

    Attributes:
        scale: A = C_g(R): outcomes are centred, not divided by the group's standard deviation.
        aggregation: token sums over the constant `max_length`, not over each sequence's own length.
    """

    scale: bool = False
    aggregation: Aggregation = "const-norm"


class DrGRPO(GRPO):
    """GRPO done right."""

    card = Card(
        name="dr_grpo",
        title="Dr.GRPO",
        paper="Understanding R1-Zero-Like Training: A Critical Perspective (2503.20783)",
        grade="A",
        source="the paper; verl's estimator without the division by the standard deviation",
        families=("math",),
        hooks=("group key: task", "loss aggregation: const-norm"),
        differences=("L_max is `max_length`, which should be near the greatest number of generated tokens a sequence",),
    )
    Config = DrGRPOConfig


METHOD = DrGRPO
