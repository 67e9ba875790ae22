"""REINFORCE++-baseline: the group's mean is taken off before whitening (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.method import Weight
from agentgym.baselines.methods.grpo import VERL_AGENT
from agentgym.baselines.methods.reinforce_pp import ReinforcePP, ReinforcePPConfig


class ReinforcePPBaselineConfig(ReinforcePPConfig, frozen=True, kw_only=True):
    """Numbers of REINFORCE++-baseline; the KL term, where it is wanted, is a part of the loss."""

    baseline: Literal["none", "group"] = "group"
    kl_reward: Weight = 0.0


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with the group's mean as baseline."""

    card = Card(
        name="reinforce_pp_baseline",
        title="REINFORCE++-baseline",
        paper="REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models (2501.03262)",
        grade="A",
        source="the paper, and verl's estimator; verl-agent's group statistics with preset verl-agent",
        families=("math", "tools"),
        hooks=("group key: task", "normalisation: all tokens of the batch"),
        differences=("the KL term of the loss is the k3 estimate, the paper's is k2; it is off by default",),
    )
    Config = ReinforcePPBaselineConfig
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"verl-agent": VERL_AGENT}


METHOD = ReinforcePPBaseline
