"""On-policy distillation: the student plays, a teacher scores what it said (GKD, arXiv 2306.13649)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm, kl_to_reference
from agentgym.baselines.core.method import Config, Method, Services, score
from agentgym.baselines.core.sample import Trajectory


class OPDConfig(Config, frozen=True, kw_only=True):
    """Numbers of OPD.

    Attributes:
        mode: "reward": the gap lp_T - lp is each token's advantage (gamma = 0); "loss": its k3 estimate is minimised.
    """

    mode: Literal["reward", "loss"] = "reward"


def gap_to_policy(trajectories: Sequence[Trajectory]) -> float:
    """Mean of lp - lp_T over the generated tokens: the one-sample estimate of the reverse divergence."""
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    gaps = [(s.behaviour_logp - s.fields["teacher_logp"])[s.action_mask] for s in samples if "teacher_logp" in s.fields]
    return float(np.concatenate(gaps).mean()) if any(len(gap) for gap in gaps) else 0.0


class OPD(Method):
    """On-policy distillation from a teacher model."""

    card = Card(
        name="opd",
        title="OPD",
        paper="On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes (2306.13649)",
        grade="A",
        source="the reverse-divergence reward of public on-policy distillation code",
        families=("math", "alfworld"),
        hooks=("scoring: teacher", "teacher model"),
        differences=(
            "the divergence is estimated at the sampled token only, not over the whole vocabulary",
            "the loss mode is k3, whose gradient is that of the forward divergence",
        ),
    )
    Config = OPDConfig
    teacher = True

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """A_j = lp_T - lp_old at each generated token."""
        score(trajectories, services, "teacher_logp", "teacher")
        for trajectory in trajectories:
            for sample in trajectory.samples:
                own = sample.action_mask
                sample.advantage[own] = (sample.fields["teacher_logp"] - sample.behaviour_logp)[own]
        if self.config.kl_coefficient:
            score(trajectories, services, "reference_logp", "reference")

    def losses(self) -> list[LossTerm]:
        """The policy gradient of the rewards, or the divergence itself in its place."""
        terms = super().losses()
        if self.config.mode == "loss":
            terms[0] = kl_to_reference(
                1.0,
                field="teacher_logp",
                aggregation=self.config.aggregation,
                max_length=self.config.max_length,
                name="teacher_kl",
            )
        return terms

    def after(self, iteration: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Reports the reverse divergence from the teacher while playing."""
        return {"reverse_kl": gap_to_policy(trajectories)}


METHOD = OPD
