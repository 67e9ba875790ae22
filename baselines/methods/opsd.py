"""OPSD: the policy distils itself, seeing more than it saw while playing; with the RLSD and Skill-SD variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm, k3, over
from agentgym.baselines.core.method import Copy, Method, Services, Share, Weight, Whole, groups_of, score
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.grpo import GRPO, GRPOConfig
from agentgym.baselines.methods.opd import gap_to_policy
from agentgym.baselines.methods.rft import action_strings
from agentgym.errors import UsageError

if TYPE_CHECKING:
    from agentgym.baselines.core.batch import Batch, Outputs


class OPSDConfig(GRPOConfig, frozen=True, kw_only=True):
    """Numbers of OPSD.

    Attributes:
        variant: what is done with the gap lp_T - lp. "opsd": it is the advantage; "rlsd": it shapes GRPO's advantage
            token by token; "skill-sd": GRPO with a term that draws the policy to the teacher.
        source: the privileged context: a successful peer's actions, or `text`.
        text: of source "text"; the same for every task.
        teacher_every: iterations after which the teacher's weights are the policy's again; 0 for the present ones.
        mix: lambda of RLSD.
        shaping_clip: RLSD's weights stay within 1 +- this.
        coefficient: of Skill-SD's term.
    """

    variant: Literal["opsd", "rlsd", "skill-sd"] = "opsd"
    source: Literal["peer", "text"] = "peer"
    text: str = ""
    teacher_every: Whole = 0
    mix: Share = 0.5
    shaping_clip: Share = 0.2
    coefficient: Weight = 0.001


def shaped(advantage: NDArray[np.float32], gap: NDArray[np.float32], mix: float, clip: float) -> NDArray[np.float32]:
    """RLSD: A ((1 - lambda) + lambda clip(exp(sign(A) gap), 1 - clip, 1 + clip)), which keeps the sign of A."""
    weight = np.exp(np.clip(np.sign(advantage) * gap, -20.0, 20.0)).clip(1 - clip, 1 + clip)
    return np.asarray(advantage * ((1 - mix) + mix * weight), dtype=np.float32)


def peer_texts(trajectories: Sequence[Trajectory]) -> list[str]:
    """For each trajectory, the actions of the first other successful one of its group; "" if there is none."""
    first: dict[int, Trajectory] = {}
    for group in groups_of(trajectories):
        for trajectory in group:
            peer = next((t for t in group if t.success and t is not trajectory), None)
            if peer is not None:
                first[id(trajectory)] = peer
    return [_told(first[id(t)]) if id(t) in first else "" for t in trajectories]


def _told(trajectory: Trajectory) -> str:
    actions = "\n".join(f"{number}. {action}" for number, action in enumerate(action_strings(trajectory), 1))
    return f"For reference, this is a sequence of actions that solved the task:\n{actions}"


def teacher_term(coefficient: float, aggregation: str, *, max_length: int = 1024) -> LossTerm:
    """Skill-SD: ratio x k3(lp - lp_T), over the tokens that a teacher has scored."""

    def loss(batch: Batch, outputs: Outputs) -> Any:
        ratio = (outputs.logp - batch["behaviour_logp"]).clamp(max=10.0).exp()
        return ratio * k3(outputs.logp - batch["teacher_logp"])

    return LossTerm("skill_sd", loss, over("teacher_weight", aggregation, max_length=max_length), coefficient)


class OPSD(GRPO):
    """On-policy self-distillation."""

    card = Card(
        name="opsd",
        title="OPSD (RLSD, Skill-SD)",
        paper="On-policy self-distillation; variants as in SDAR (2605.15155)",
        grade="A",
        source="the public code of SDAR",
        families=("alfworld", "webshop", "search"),
        hooks=("scoring: privileged context", "token shaping: rlsd", "loss: skill-sd", "copy: stale teacher"),
        differences=(
            "the privileged context is a peer's success or one given text, SDAR's code retrieves skills",
            "without a privileged context the gap counts as 0",
            "skill-sd: exp(d) - d - 1 of d = lp - lp_T, as its formula is written; the KL term has d = lp_ref - lp",
            "the gap is taken at the sampled tokens with the log-probabilities they were played with",
        ),
    )
    Config = OPSDConfig
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **GRPO.PRESETS,
        "rlsd": {"variant": "rlsd"},
        "skill-sd": {"variant": "skill-sd"},
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.source == "text" and not config.text.strip():
            raise UsageError('opsd with source "text" needs the privileged text: add --option text="..."')

    @property
    def copies(self) -> dict[str, Copy]:
        """The stale teacher, where there is one, beside the reference."""
        every = self.config.teacher_every
        return {**super().copies, **({"stale": Copy(every=every)} if every else {})}

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Scores the generated tokens under the privileged context, and uses the gap as the variant says."""
        config = self.config
        if config.variant == "opsd":
            if config.kl_coefficient:
                score(trajectories, services, "reference_logp", "reference")
        else:
            Method.advantages(self, trajectories, services)
        self._ask(trajectories, services)
        for sample in self.samples(trajectories):
            own = sample.action_mask
            gap = (sample.fields["teacher_logp"] - sample.behaviour_logp)[own]
            if config.variant == "opsd":
                sample.advantage[own] = gap
            elif config.variant == "rlsd":
                sample.advantage[own] = shaped(sample.advantage[own], gap, config.mix, config.shaping_clip)

    def _ask(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        texts = peer_texts(trajectories) if self.config.source == "peer" else [self.config.text] * len(trajectories)
        asked, prefixes = [], []
        for trajectory, text in zip(trajectories, texts, strict=True):
            prefix = services.encode(text) if text else []
            for sample in trajectory.samples:
                sample.fields["teacher_logp"] = sample.behaviour_logp.copy()
                sample.fields["teacher_weight"] = sample.action_mask.astype(np.float32) * bool(text)
                if text:
                    asked.append(sample)
                    prefixes.append(prefix)
        if asked:
            copy = "stale" if self.config.teacher_every else "policy"
            for sample, logp in zip(asked, services.logp(asked, copy, prefix=prefixes), strict=True):
                sample.fields["teacher_logp"] = logp

    def losses(self) -> list[LossTerm]:
        """GRPO's terms, and Skill-SD's where it is chosen."""
        terms = super().losses()
        if self.config.variant == "skill-sd":
            config = self.config
            terms.append(teacher_term(config.coefficient, config.aggregation, max_length=config.max_length))
        return terms

    def after(self, iteration: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Reports the gap between the policy and itself with the privileged context."""
        return {"teacher_gap": -gap_to_policy(trajectories)}


METHOD = OPSD
