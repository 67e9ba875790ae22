"""RFT: imitate one's own successes, sampled anew in each iteration (rejection-sampling fine-tuning)."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm, cross_entropy
from agentgym.baselines.core.method import Config, Count, Group, Method, Services
from agentgym.baselines.core.sample import Trajectory


class RFTConfig(Config, frozen=True, kw_only=True):
    """Numbers of RFT.

    Attributes:
        per_task: k, successes of a task that are imitated, at most.
        shortest: take those with the fewest generated tokens; otherwise the first ones sampled.
        deduplicate: leave out a success whose actions are those of another one of its task.
    """

    per_task: Count = 2
    shortest: bool = False
    deduplicate: bool = True


def action_strings(trajectory: Trajectory) -> tuple[str, ...]:
    """The actions of a trajectory, as they were read from what the policy wrote."""
    return tuple(turn.completion if turn.action is None else turn.action for turn in trajectory.turns)


class RFT(Method):
    """Rejection-sampling fine-tuning."""

    card = Card(
        name="rft",
        title="RFT",
        paper="Scaling Relationship on Learning Mathematical Reasoning with Large Language Models (2308.01825)",
        grade="standard",
        source="textbook: cross-entropy on one's own successes",
        families=("math",),
        hooks=("filter: successes", "loss: cross-entropy"),
        differences=("the present policy samples and is trained on, iteration after iteration", "k = 2 is our choice"),
    )
    Config = RFTConfig

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """At most k different successes a task; groups without any are dropped."""
        config = self.config
        taken: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        kept = []
        for group in groups:
            successes = [trajectory for trajectory in group if trajectory.success]
            if config.shortest:
                successes.sort(key=lambda trajectory: sum(sample.actions for sample in trajectory.samples))
            chosen = []
            for trajectory in successes:
                known = taken.setdefault((trajectory.episode.task_id, trajectory.role), [])
                actions = action_strings(trajectory)
                if len(known) < config.per_task and not (config.deduplicate and actions in known):
                    known.append(actions)
                    chosen.append(trajectory)
            if chosen:
                kept.append(chosen)
        return kept

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Weighs the generated tokens for the cross-entropy."""
        for trajectory in trajectories:
            for sample in trajectory.samples:
                sample.ce_weight[sample.action_mask] = 1.0

    def losses(self) -> list[LossTerm]:
        """-log p of the actions that were kept."""
        return [cross_entropy(aggregation=self.config.aggregation, max_length=self.config.max_length)]


METHOD = RFT
