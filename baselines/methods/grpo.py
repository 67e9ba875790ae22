"""GRPO: the outcome of each trajectory, normalised within its group (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import normalise
from agentgym.baselines.core.method import Config, Ddof, Method
from agentgym.baselines.core.sample import Trajectory


class GRPOConfig(Config, frozen=True, kw_only=True):
    """Numbers of GRPO.

    Attributes:
        scale: divide by the group's standard deviation.
        ddof: 1 for the sample standard deviation.
        stat_weighting: each trajectory enters its group's statistics once, or once a turn (verl-agent).
        singleton: advantage of a group of one: 0, or its raw outcome (verl-agent).
    """

    scale: bool = True
    ddof: Ddof = 1
    stat_weighting: Literal["trajectory", "per_turn"] = "trajectory"
    singleton: Literal["zero", "raw"] = "zero"


VERL_AGENT: Mapping[str, Any] = {"stat_weighting": "per_turn", "singleton": "raw"}


def outcome_advantages(
    trajectories: Sequence[Trajectory], config: GRPOConfig, *, scale: bool = True
) -> NDArray[np.float64]:
    """A_i = Z_g(R_i), or C_g unless both `config.scale` and `scale`; one a trajectory."""
    return normalise(
        [t.outcome for t in trajectories],
        [t.group for t in trajectories],
        scale=config.scale and scale,
        ddof=config.ddof,
        counts=[len(t) for t in trajectories] if config.stat_weighting == "per_turn" else None,
        singleton=config.singleton,
    )


class GRPO(Method):
    """Group relative policy optimisation."""

    card = Card(
        name="grpo",
        title="GRPO",
        paper="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models (2402.03300)",
        grade="A",
        source="the paper; verl-agent's estimator with preset verl-agent",
        families=("alfworld", "webshop", "search"),
        hooks=("group key: task",),
        differences=("each trajectory enters the statistics once; verl-agent counts it once a turn (preset)",),
    )
    Config = GRPOConfig
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"verl-agent": VERL_AGENT}

    def turn_advantages(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
        """The outcome's advantage at every turn."""
        outcome = outcome_advantages(trajectories, self.config)
        return [np.full(len(t), value) for t, value in zip(trajectories, outcome, strict=True)]


METHOD = GRPO
