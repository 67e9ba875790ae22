"""Loss terms. A term gives one number a token; its normalisation is a weight a token, fixed over the whole mini-batch.

Because the weights are made before the mini-batch is cut into micro-batches (and into shares of several processes),
the sum of all parts is the same loss, however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import choices

if TYPE_CHECKING:
    from agentgym.baselines.core.batch import Batch, Outputs
    from agentgym.baselines.core.sample import Sample

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "const-norm"]
AGGREGATIONS: tuple[str, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "const-norm")
Weights = list[NDArray[np.float32]]


@dataclass(frozen=True)
class LossTerm:
    """A part of the loss.

    Attributes:
        name: in metrics.
        loss: (batch, outputs) -> (N,) values, one a selected token.
        weights: samples of the whole mini-batch -> (T,) weights each; the term is the weighted sum.
        coefficient: of the term.
    """

    name: str
    loss: Callable[[Batch, Outputs], Any]
    weights: Callable[[Sequence[Sample]], Weights]
    coefficient: float = 1.0


def aggregate(masks: Sequence[NDArray[Any]], mode: str, *, max_length: int = 1024) -> Weights:
    """Weights a token that make a weighted sum the wanted average.

    Args:
        masks: (T,) each, non-negative; 0 leaves a token out.
        mode: "token-mean": over all tokens of the mini-batch; "seq-mean-token-mean": over sequences of the mean over
            their tokens; "seq-mean-token-sum": over sequences of their sums; "const-norm": sums over max_length, over
            sequences (Dr.GRPO).
        max_length: of "const-norm".

    Raises:
        UsageError: for an unknown mode.
    """
    counts = [float(mask.sum()) for mask in masks]
    used = sum(count > 0 for count in counts) or 1
    if mode == "token-mean":
        scales = [1.0 / (sum(counts) or 1.0)] * len(masks)
    elif mode == "seq-mean-token-mean":
        scales = [1.0 / (used * (count or 1.0)) for count in counts]
    elif mode == "seq-mean-token-sum":
        scales = [1.0 / used] * len(masks)
    elif mode == "const-norm":
        scales = [1.0 / (used * max_length)] * len(masks)
    else:
        raise choices("aggregation", mode, list(AGGREGATIONS))
    return [(mask * scale).astype(np.float32) for mask, scale in zip(masks, scales, strict=True)]


def over(field: str, mode: str, *, max_length: int = 1024) -> Callable[[Sequence[Sample]], Weights]:
    """Weights by a field of the samples: "pg_weight", "ce_weight", "kl_weight" or one of `fields`."""
    if mode not in AGGREGATIONS:
        raise choices("aggregation", mode, list(AGGREGATIONS))

    def weights(samples: Sequence[Sample]) -> Weights:
        masks = [sample.fields[field] if field in sample.fields else getattr(sample, field) for sample in samples]
        return aggregate(masks, mode, max_length=max_length)

    return weights


def clipped_policy_gradient(
    clip_low: float,
    clip_high: float,
    *,
    level: Literal["token", "turn", "sequence"] = "token",
    aggregation: str = "token-mean",
    max_length: int = 1024,
    coefficient: float = 1.0,
) -> LossTerm:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), PPO's objective (Schulman et al. 2017).

    The log-ratio is held within +-20, beyond which there is no gradient.

    Args:
        clip_low, clip_high: range of the ratio.
        level: what shares a ratio: each token its own, or the exponent of the mean log-ratio over a turn or a sample
            (GSPO, Zheng et al. 2025: the value is shared, each token carries its own gradient).
        aggregation, max_length: see `aggregate`.
        coefficient: of the term.
    """

    def loss(batch: Batch, outputs: Outputs) -> Any:
        advantage = batch["advantage"]
        log_ratio = outputs.logp - batch["behaviour_logp"]
        if level != "token":
            mean = batch.mean_within(log_ratio, level)
            log_ratio = mean.detach() + outputs.logp - outputs.logp.detach()
        # Far beyond any clip range; exp would give inf there, and inf times an advantage of 0 is no number.
        log_ratio = log_ratio.clamp(-20.0, 20.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        value = -(ratio * advantage).minimum(clipped * advantage)
        weight = batch["pg_weight"]
        hit = ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))
        batch.report("clip_share", hit * weight, weight)
        batch.report("ratio", ratio * weight, weight)
        batch.report("approx_kl", (ratio - 1 - log_ratio) * weight, weight)  # of the update, k3
        return value

    return LossTerm("policy", loss, over("pg_weight", aggregation, max_length=max_length), coefficient)


def k3(delta: Any) -> Any:
    """exp(d) - d - 1 of d = lp_other - lp, clamped to +-10: Schulman's low-variance estimate of the divergence."""
    delta = delta.clamp(-10.0, 10.0)
    return delta.exp() - delta - 1.0


def kl_to_reference(
    coefficient: float,
    *,
    field: str = "reference_logp",
    aggregation: str = "token-mean",
    max_length: int = 1024,
    name: str = "kl",
) -> LossTerm:
    """k3 between the policy and the field of log-probabilities `field`, over kl_weight; reported as `name`."""

    def loss(batch: Batch, outputs: Outputs) -> Any:
        value = k3(batch[field] - outputs.logp)
        batch.report(name, value * batch["kl_weight"], batch["kl_weight"])
        return value

    return LossTerm(name, loss, over("kl_weight", aggregation, max_length=max_length), coefficient)


def entropy_bonus(coefficient: float, *, aggregation: str = "token-mean", max_length: int = 1024) -> LossTerm:
    """Minus the entropy of the next-token distribution, over pg_weight."""
    return LossTerm(
        "entropy",
        lambda batch, outputs: -outputs.entropy,
        over("pg_weight", aggregation, max_length=max_length),
        coefficient,
    )


def cross_entropy(
    coefficient: float = 1.0, *, field: str = "ce_weight", aggregation: str = "token-mean", max_length: int = 1024
) -> LossTerm:
    """-log p of the tokens with weight in `field`."""
    weights = over(field, aggregation, max_length=max_length)
    return LossTerm("ce", lambda batch, outputs: -outputs.logp, weights, coefficient)


def value_regression(
    coefficient: float, clip: float | None, *, aggregation: str = "token-mean", max_length: int = 1024
) -> LossTerm:
    """Half the squared error of the value head, clipped around the old value as in PPO; over "value_weight".

    Args:
        coefficient: of the term.
        clip: the new value counts at most this far from "old_value"; None for no clipping.
        aggregation, max_length: see `aggregate`.
    """

    def loss(batch: Batch, outputs: Outputs) -> Any:
        target, value = batch["value_target"], outputs.value
        error = (value - target) ** 2
        if clip is not None:
            old = batch["old_value"]
            near = old + (value - old).clamp(-clip, clip)
            error = error.maximum((near - target) ** 2)
        return 0.5 * error

    return LossTerm("value", loss, over("value_weight", aggregation, max_length=max_length), coefficient)
