"""DPO on pairs of trajectories of one task, a success against a failure (2305.18290; pairs as in ETO, 2403.02502)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm, Weights
from agentgym.baselines.core.method import Config, Copy, Group, Method, Positive, Services, Whole, groups_of, score
from agentgym.baselines.core.sample import Sample, Trajectory
from agentgym.errors import UsageError

if TYPE_CHECKING:
    from agentgym.baselines.core.batch import Batch, Outputs

SIDE = "pair_side"  # field: +1 on the better, -1 on the worse trajectory's generated tokens


class DPOConfig(Config, frozen=True, kw_only=True):
    """Numbers of DPO.

    Attributes:
        beta: how far the policy may move from the reference.
        reference_every: iterations after which the reference is the policy again; 0 for never.
    """

    beta: Positive = 0.1
    reference_every: Whole = 0


def preference_loss(beta: float) -> LossTerm:
    """-log sigmoid(m), m = beta ((lp_w - ref_w) - (lp_l - ref_l)), lp summed over a trajectory's generated tokens.

    A mean over pairs. The samples of a pair have the same `unit`, so that it is never cut into two micro-batches.
    """

    def loss(batch: Batch, outputs: Outputs) -> Any:
        units = {unit: number for number, unit in enumerate(dict.fromkeys(s.unit for s in batch.samples))}
        pair = batch.sample_of.new_tensor([units[sample.unit] for sample in batch.samples])[batch.sample_of]
        gain = batch[SIDE] * (outputs.logp - batch["reference_logp"])
        margin = beta * gain.new_zeros(len(units)).index_add(0, pair, gain)
        value = (-margin).logaddexp(margin.new_zeros(len(units)))
        share = batch.weights["dpo"]
        batch.report("pair_margin", margin[pair] * share, share)
        batch.report("pair_accuracy", (margin > 0)[pair] * share, share)
        return value[pair]

    return LossTerm("dpo", loss, pair_weights)


def pair_weights(samples: Sequence[Sample]) -> Weights:
    """1 / (pairs x generated tokens of the pair) on each of them.

    Raises:
        UsageError: if one side of a pair is missing.
    """
    tokens: Counter[str] = Counter()
    sides: dict[str, set[float]] = {}
    for sample in samples:
        tokens[sample.unit] += sample.actions
        sides.setdefault(sample.unit, set()).update(np.unique(sample.fields[SIDE]).tolist())
    for unit, found in sides.items():
        if not found >= {-1.0, 1.0}:
            raise UsageError(f"pair {unit!r} has lost one of its sides: keep the samples of a unit in one mini-batch")
    scale = 1.0 / len(tokens) if tokens else 0.0
    return [(scale / tokens[s.unit] * np.abs(s.fields[SIDE])).astype(np.float32) for s in samples]


class DPO(Method):
    """Direct preference optimisation over trajectories."""

    card = Card(
        name="dpo",
        title="DPO (trajectory pairs)",
        paper="Direct Preference Optimization: Your Language Model is Secretly a Reward Model (2305.18290)",
        grade="standard",
        source="textbook; pairs of explored trajectories as in ETO (2403.02502)",
        families=("webshop", "alfworld"),
        hooks=("filter: pairs", "scoring: reference", "loss: preference", "copy: reference"),
        differences=(
            "the better trajectory is the policy's own best, ETO takes the expert's",
            "the worse one is a random failure of the same group (our choice)",
        ),
    )
    Config = DPOConfig

    @property
    def copies(self) -> dict[str, Copy]:
        """The reference."""
        return {"reference": Copy(every=self.config.reference_every)}

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Groups with a success and a failure that have tokens."""
        return [group for group in groups if len({t.success for t in group if _tokens(t)}) > 1]

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Makes one pair of each group: its best success (the shortest of equals) and a random failure."""
        paired = []
        for group in groups_of([t for t in trajectories if _tokens(t)]):
            best = max((t for t in group if t.success), key=lambda t: (t.outcome, -_tokens(t)))
            failures = [t for t in group if not t.success]
            for side, chosen in ((1.0, best), (-1.0, failures[services.rng.integers(len(failures))])):
                paired.append(chosen)
                for sample in chosen.samples:
                    sample.unit = chosen.group
                    sample.fields[SIDE] = side * sample.action_mask.astype(np.float32)
        score(paired, services, "reference_logp", "reference")

    def samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Those of the pairs."""
        return [sample for sample in super().samples(trajectories) if SIDE in sample.fields]

    def losses(self) -> list[LossTerm]:
        """The preference loss."""
        return [preference_loss(self.config.beta)]


def _tokens(trajectory: Trajectory) -> int:
    return sum(sample.actions for sample in trajectory.samples)


METHOD = DPO
