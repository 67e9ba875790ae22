"""What a method's hooks and a played iteration must hold to; each breach is named with the hook and the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.baselines.core.method import Group
from agentgym.baselines.core.sample import Trajectory
from agentgym.episode import Episode
from agentgym.errors import InfrastructureError, UsageError
from agentgym.rollout import EpisodeSpec


def check_metrics(given: Any, line: Mapping[str, Any]) -> dict[str, Any]:
    """What `after` returned, if it is new numbers by name."""
    if not isinstance(given, Mapping):
        raise UsageError(f"`after` returned {given!r:.60}; it must return a dict of numbers (or {{}})")
    taken = sorted(set(given) & ({*line} | {"iteration", "kind", "seconds", "env_steps", "tokens", "scored_tokens"}))
    if taken:
        raise UsageError(f"`after` returned {taken}, names that the trainer's own metrics have; choose others")
    return dict(given)


def check_specs(specs: Sequence[EpisodeSpec]) -> None:
    """Refuses a plan that names an episode twice: only one could be told apart."""
    seen: set[str] = set()
    for spec in specs:
        if spec.episode_id in seen:
            raise UsageError(f"`plan` names the episode {spec.episode_id} twice; give each its own seed or repeat")
        seen.add(spec.episode_id)


def check_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Refuses rewards that are not one finite number a turn."""
    for trajectory in trajectories:
        rewards = np.asarray(trajectory.rewards)
        where = f"`rewards` left {trajectory.episode.episode_id} ({trajectory.role})"
        if rewards.shape != (len(trajectory),):
            raise UsageError(
                f"{where} with shape {rewards.shape}; each of its {len(trajectory)} turns needs one number"
            )
        if not np.isfinite(rewards).all():
            turn = int(np.argmin(np.isfinite(rewards)))
            raise UsageError(f"{where} with {rewards[turn]} at turn {turn}")


def check_kept(kept: Any) -> list[Group]:
    """What `keep` returned, if it is a list of groups."""
    if not isinstance(kept, Sequence) or not all(isinstance(group, list) for group in kept):
        raise UsageError(f"`keep` returned {kept!r:.60}; it must return a list of groups")
    return list(kept)


def refuse_all_lost(episodes: Sequence[Episode], trajectories: Sequence[Trajectory] | None = None) -> None:
    """Raises if nothing can be learned from: every episode faulted, or none has a token.

    Raises:
        InfrastructureError: with the cause of the last fault.
        UsageError: if no token was sampled.
    """
    if episodes and not any(episode.finished for episode in episodes):
        last = episodes[-1]
        raise InfrastructureError(
            f"all {len(episodes)} episodes faulted, the last one by {last.cause}: {last.message}. Mend that, then "
            "continue with --resume"
        )
    if episodes and trajectories is not None and not any(trajectory.samples for trajectory in trajectories):
        raise UsageError(
            "no episode has a sampled token: the prompt leaves no room for an answer; raise max_context or take a "
            "model with more positions"
        )


def silent(groups: Sequence[Group]) -> int:
    """Groups whose outcomes are all equal: they say nothing about what was better."""
    return sum(len({trajectory.outcome for trajectory in group}) < 2 for group in groups)
