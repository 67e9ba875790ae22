"""SFT: cross-entropy on what the expert did (behaviour cloning), with fresh demonstrations in every iteration."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm, cross_entropy
from agentgym.baselines.core.method import Config, Count, Method, Services, Weight
from agentgym.baselines.core.sample import Trajectory


class SFTConfig(Config, frozen=True, kw_only=True):
    """Numbers of SFT.

    Attributes:
        group_size: demonstrations a task.
        observation_weight: weight of observation tokens beside 1 for action tokens; 0 imitates actions only.
    """

    group_size: Count = 1
    observation_weight: Weight = 0.0


class SFT(Method):
    """Supervised fine-tuning on expert episodes; turns with noise are played but not imitated."""

    card = Card(
        name="sft",
        title="SFT",
        paper="Behaviour cloning",
        grade="standard",
        source="textbook",
        families=("any with an expert",),
        hooks=("actor: expert", "loss: cross-entropy"),
    )
    Config = SFTConfig
    actor = "expert"

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Weights 1 for imitated actions; no advantages are needed."""
        for trajectory in trajectories:
            noisy = [index for index, turn in enumerate(trajectory.turns) if turn.usage.get("noise")]
            for sample in trajectory.samples:
                sample.ce_weight[sample.action_mask] = 1.0
                for index in noisy:
                    sample.ce_weight[sample.action_mask & (sample.turn_of == index)] = 0.0
                sample.ce_weight[sample.obs_mask] = self.config.observation_weight
                sample.ce_weight[0] = 0.0  # nothing stands before it

    def losses(self) -> list[LossTerm]:
        """-log p of the imitated tokens."""
        return [cross_entropy(aggregation=self.config.aggregation, max_length=self.config.max_length)]


METHOD = SFT
