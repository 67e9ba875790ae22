"""RLOO: each outcome against the mean of the other ones of its group (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import leave_one_out
from agentgym.baselines.core.method import Config, Method
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.grpo import VERL_AGENT


class RLOOConfig(Config, frozen=True, kw_only=True):
    """Numbers of RLOO.

    Attributes:
        stat_weighting: each trajectory enters its group's mean once, or once a turn (verl-agent).
        singleton: advantage of a group of one: 0, or its raw outcome (verl-agent).
    """

    stat_weighting: Literal["trajectory", "per_turn"] = "trajectory"
    singleton: Literal["zero", "raw"] = "zero"


class RLOO(Method):
    """REINFORCE leave-one-out."""

    card = Card(
        name="rloo",
        title="RLOO",
        paper="Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs "
        "(2402.14740)",
        grade="A",
        source="the paper; verl-agent's estimator with preset verl-agent",
        families=("rlhf",),
        hooks=("group key: task",),
        differences=(
            "the ratio is clipped, as in verl and TRL; with one update a batch it is REINFORCE",
            "a KL term, where it is wanted, is a part of the loss; the paper takes it off the reward",
        ),
    )
    Config = RLOOConfig
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"verl-agent": VERL_AGENT}

    def turn_advantages(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
        """A_i = R_i - mean of the other R_j, at every turn."""
        outcome = leave_one_out(
            [t.outcome for t in trajectories],
            [t.group for t in trajectories],
            counts=[len(t) for t in trajectories] if self.config.stat_weighting == "per_turn" else None,
            singleton=self.config.singleton,
        )
        return [np.full(len(t), value) for t, value in zip(trajectories, outcome, strict=True)]


METHOD = RLOO
