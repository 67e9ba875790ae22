"""PPO: generalised advantages from a value head, at tokens or at turns (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import generalised_advantages, whiten
from agentgym.baselines.core.losses import LossTerm, value_regression
from agentgym.baselines.core.method import Config, Ddof, Method, Positive, Services, Share, Weight, score
from agentgym.baselines.core.sample import Trajectory

Floats = NDArray[np.float64]


class PPOConfig(Config, frozen=True, kw_only=True):
    """Numbers of PPO.

    Attributes:
        level: a step is a token, or a turn whose value is that of its first token.
        gamma, lam: discount and trace decay, a step.
        value_clip: the value may move this far from the old one in an update; None for no limit.
        value_coefficient: weight of the value loss.
        whiten: normalise the advantages over all tokens of the batch.
        ddof: of that standard deviation.
    """

    level: Literal["token", "turn"] = "token"
    gamma: Share = 1.0
    lam: Share = 0.95
    value_clip: Positive | None = 0.5
    value_coefficient: Weight = 0.5
    whiten: bool = True
    ddof: Ddof = 1


def estimate(trajectory: Trajectory, config: PPOConfig) -> None:
    """Fills advantage, "value_target" and "value_weight" of a trajectory's samples from "old_value"."""
    for sample in trajectory.samples:
        for name in ("value_target", "value_weight"):
            sample.fields[name] = np.zeros(len(sample), dtype=np.float32)
    masks = [sample.action_mask for sample in trajectory.samples]
    if not any(mask.any() for mask in masks):
        return
    value = _gather([sample.fields["old_value"] for sample in trajectory.samples], masks)
    turn = _gather([sample.turn_of for sample in trajectory.samples], masks).astype(np.int64)
    # Turns of a trajectory come in order, so each one is a run of tokens.
    turns, first, block = np.unique(turn, return_index=True, return_inverse=True)
    reward = rewards_at(trajectory.rewards, turns)
    if config.level == "turn":
        advantage, target = generalised_advantages(reward, value[first], config.gamma, config.lam)
        advantage, target = advantage[block], target[block]
        weight = np.zeros(len(turn))
        weight[first] = 1.0
    else:
        last = np.append(first[1:], len(turn)) - 1
        at_token = np.zeros(len(turn))
        at_token[last] = reward
        advantage, target = generalised_advantages(at_token, value, config.gamma, config.lam)
        weight = np.ones(len(turn))
    start = 0
    for sample, mask in zip(trajectory.samples, masks, strict=True):
        here = slice(start, start + int(mask.sum()))
        sample.advantage[mask] = advantage[here]
        sample.fields["value_target"][mask] = target[here]
        sample.fields["value_weight"][mask] = weight[here]
        start = here.stop


def rewards_at(rewards: Floats, turns: NDArray[np.int64]) -> Floats:
    """Rewards of the turns that have tokens; those of turns without any go to the last such turn before them.

    Args:
        rewards: (n,), one a turn.
        turns: (m,) indices of the turns that have tokens, ascending.

    Returns:
        (m,) with the same sum.
    """
    result = np.zeros(len(turns))
    places = np.searchsorted(turns, np.arange(len(rewards)), side="right") - 1
    np.add.at(result, places.clip(min=0), rewards)
    return result


def _gather(arrays: Sequence[NDArray[np.float32] | NDArray[np.int32]], masks: Sequence[NDArray[np.bool_]]) -> Floats:
    return np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)]).astype(np.float64)


class PPO(Method):
    """Proximal policy optimisation."""

    card = Card(
        name="ppo",
        title="PPO",
        paper="Proximal Policy Optimization Algorithms (1707.06347)",
        grade="A",
        source="the paper and its GAE (1506.02438), and verl's estimator and clipped value loss",
        families=("rlhf", "alfworld", "webshop"),
        hooks=("scoring: value", "value head", "loss: value regression"),
        differences=(
            "the value head shares the policy's trunk; verl trains a critic of its own",
            "the turn level is ours: values at the first token of each turn only",
        ),
    )
    Config = PPOConfig
    value_head = True

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """GAE along each trajectory, over all its samples; targets of the value head are advantage + value."""
        samples = [sample for trajectory in trajectories for sample in trajectory.samples]
        for sample, value in zip(samples, services.values(samples), strict=True):
            sample.fields["old_value"] = np.asarray(value, dtype=np.float32)
        for trajectory in trajectories:
            estimate(trajectory, self.config)
        if self.config.whiten:
            parts = whiten([sample.advantage[sample.action_mask] for sample in samples], ddof=self.config.ddof)
            for sample, advantage in zip(samples, parts, strict=True):
                sample.advantage[sample.action_mask] = advantage
        if self.config.kl_coefficient:
            score(trajectories, services, "reference_logp", "reference")

    def losses(self) -> list[LossTerm]:
        """The clipped policy gradient and the clipped value loss."""
        config = self.config
        value = value_regression(
            config.value_coefficient,
            config.value_clip,
            aggregation=config.aggregation,
            max_length=config.max_length,
        )
        return [*super().losses(), value]


METHOD = PPO
