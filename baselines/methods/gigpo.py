"""GiGPO: the episode's advantage plus one among all turns in the same state (Feng et al. 2025, arXiv 2505.10978)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import discounted_returns, fuzzy_keys, normalise
from agentgym.baselines.core.method import Method, Share, Weight, groups_of
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.grpo import VERL_AGENT, GRPOConfig, outcome_advantages


class GiGPOConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of GiGPO.

    Attributes:
        gamma: discount of the step returns.
        step_weight: w, weight of the step advantage.
        mode: "mean_std_norm" divides the advantages of episodes and of steps by their standard deviations,
            "mean_norm" only centres both.
        scale: with false, the episodes' advantages are only centred whatever the mode.
        similarity: with a value below 1, turns of one task whose observations are this similar share a group.
    """

    gamma: Share = 0.95
    step_weight: Weight = 1.0
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_std_norm"
    similarity: Share = 1.0


def step_keys(trajectories: Sequence[Trajectory], similarity: float) -> list[tuple[str, object]]:
    """(group, state) of every turn, in order; similar observations are one state where `similarity` is below 1."""
    if similarity >= 1:
        return [(t.group, key) for t in trajectories for key in t.state_keys]
    keys: dict[tuple[int, int], tuple[str, object]] = {}
    for group in groups_of(trajectories):
        places = [(id(t), turn) for t in group for turn in range(len(t))]
        numbers = fuzzy_keys([turn.observation for t in group for turn in t.turns], similarity)
        keys.update({place: (group[0].group, number) for place, number in zip(places, numbers, strict=True)})
    return [keys[id(t), turn] for t in trajectories for turn in range(len(t))]


class GiGPO(Method):
    """Group-in-group policy optimisation."""

    card = Card(
        name="gigpo",
        title="GiGPO",
        paper="Group-in-Group Policy Optimization for LLM Agent Training (2505.10978)",
        grade="A",
        source="verl-agent's estimator, at its defaults with preset verl-agent",
        families=("alfworld", "webshop", "search"),
        hooks=("capability: state_key", "group key: state"),
        differences=(
            "each trajectory enters the episode statistics once; verl-agent counts it once a turn (preset)",
            "mode mean_norm centres both terms, as verl-agent does; `scale` off centres the episode term alone (ours)",
            "states are compared by the environment's state key, verl-agent compares observations",
        ),
    )
    Config = GiGPOConfig
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"verl-agent": VERL_AGENT}
    needs = frozenset({"state_key"})

    def turn_advantages(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
        """A_E + w A_S, both scaled or both only centred by the mode."""
        config = self.config
        scale = config.mode == "mean_std_norm"
        outcome = outcome_advantages(trajectories, config, scale=scale)
        returns = [discounted_returns(t.rewards, config.gamma) for t in trajectories]
        step = normalise(
            np.concatenate(returns) if returns else [],
            step_keys(trajectories, config.similarity),
            scale=scale,
            ddof=config.ddof,
        )
        parts = np.split(step, np.cumsum([len(t) for t in trajectories])[:-1])
        return [whole + config.step_weight * part for whole, part in zip(outcome, parts, strict=True)]


METHOD = GiGPO
