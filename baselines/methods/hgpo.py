"""HGPO: step advantages in a hierarchy of groups that share more and more history (ICLR 2026, verl-agent's recipe)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import discounted_returns, history_keys, normalise
from agentgym.baselines.core.method import Ddof, Method, Share, Weight, Whole
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.grpo import GRPOConfig, outcome_advantages

ZERO = 1e-9  # an advantage below it is 0 but for rounding


class HGPOConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of HGPO.

    Attributes:
        gamma: discount of the step returns.
        history_length: K; groups are made for the last 1 ... K + 1 states.
        alpha: the weight of level k is (k + 1) ** alpha, over the levels that contribute.
        mode: "mean_std_norm" divides by the standard deviation, "mean_norm" only centres, the base group too.
        step_ddof: of the step groups' standard deviation; 0 for the population's.
        base_group: the outcome's advantage is level 0.
        scale, ddof, stat_weighting, singleton: of the base group, see `GRPOConfig`.
        short_history: a turn with fewer than k states behind it is compared by the whole of them, or has no level k
            (verl-agent).
    """

    gamma: Share = 0.95
    history_length: Whole = 2
    alpha: Weight = 1.0
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_std_norm"
    step_ddof: Ddof = 0
    base_group: bool = False
    short_history: Literal["prefix", "skip"] = "prefix"


class HGPO(Method):
    """Hierarchy-of-groups policy optimisation."""

    card = Card(
        name="hgpo",
        title="HGPO",
        paper="Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks (ICLR 2026)",
        grade="A",
        source="verl-agent's recipe, exactly with preset verl-agent",
        families=("alfworld", "webshop"),
        hooks=("capability: state_key", "group key: history of k states"),
        differences=(
            "turns with fewer than k states behind them are compared by the whole prefix; the recipe leaves that "
            "level out (preset)",
            "states are compared by the environment's state key, the recipe compares observations",
        ),
    )
    Config = HGPOConfig
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "verl-agent": {"stat_weighting": "per_turn", "singleton": "raw", "short_history": "skip"}
    }
    needs = frozenset({"state_key"})

    def turn_advantages(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
        """A = sum_k w_k a_k over the levels with a_k != 0, with weights that sum to 1."""
        config = self.config
        if not trajectories:
            return []
        sizes = [len(t) for t in trajectories]
        returns = np.concatenate([discounted_returns(t.rewards, config.gamma) for t in trajectories])
        levels = [(k, self._level(trajectories, returns, k)) for k in range(1, config.history_length + 2)]
        if config.base_group:
            base = outcome_advantages(trajectories, config, scale=config.mode == "mean_std_norm")
            levels.append((0, np.repeat(base, sizes)))
        total, weights = np.zeros(len(returns)), np.zeros(len(returns))
        for k, advantage in levels:
            weight = (k + 1.0) ** config.alpha * (np.abs(advantage) > ZERO)
            total += weight * advantage
            weights += weight
        mean = np.divide(total, weights, out=np.zeros(len(returns)), where=weights > 0)
        return np.split(mean, np.cumsum(sizes)[:-1])

    def _level(self, trajectories: Sequence[Trajectory], returns: NDArray[np.float64], k: int) -> NDArray[np.float64]:
        """a_k: returns normalised among the turns of a group whose last k states are the same."""
        config = self.config
        keys = [(t.group, key) for t in trajectories for key in history_keys(t.state_keys, k)]
        advantage = normalise(returns, keys, scale=config.mode == "mean_std_norm", ddof=config.step_ddof)
        if config.short_history == "skip":
            advantage[[len(key) < k for _, key in keys]] = 0.0
        return advantage


METHOD = HGPO
