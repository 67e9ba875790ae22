"""Numbers about played episodes: of training, and of held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.tasks import TaskDraw
from agentgym.episode import Episode, final_episodes
from agentgym.rollout import EpisodeSpec

EVALUATION_SEED = 2_000_000_011  # of all evaluations: the same games and draws for every method


def evaluation_specs(tasks: TaskDraw, config: TrainConfig, episodes: int) -> list[EpisodeSpec]:
    """The held-out episodes; further repeats of the tasks where there are fewer than episodes."""
    held_out = tasks.held_out(episodes)
    return [
        EpisodeSpec(
            task_id=held_out[place % len(held_out)].id,
            split=held_out[place % len(held_out)].split,
            seed=EVALUATION_SEED,
            repeat=place // len(held_out),
            group=str(place),
        )
        for place in range(episodes)
    ]


def episode_numbers(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Success, return, turns, invalid share and faults of episodes; the last attempt of each counts."""
    final = final_episodes(list(episodes))
    done = [episode for episode in final if episode.finished]
    turns = [turn for episode in done for turn in episode.turns]
    numbers: dict[str, Any] = {
        "faults": sum(not episode.finished for episode in episodes),
        "lost": len(final) - len(done),
        "played": len(done),
    }
    if done:
        numbers |= {
            "success": float(np.mean([episode.outcome == "success" for episode in done])),
            "outcome": float(np.mean([episode.total_reward or 0.0 for episode in done])),
            "turns": len(turns) / len(done),
            "invalid": float(np.mean([not turn.valid for turn in turns])),
            "tokens_per_episode": sum(len(turn.arrays.get("completion_ids", ())) for turn in turns) / len(done),
            "surprise": _surprise(turns),
        }
    return numbers


def _surprise(turns: Sequence[Any]) -> float:
    """Mean -log p of the sampled tokens: an unbiased estimate of the entropy while playing."""
    parts = [turn.arrays["logprobs"] for turn in turns if len(turn.arrays.get("logprobs", ()))]
    return float(-np.mean(np.concatenate(parts))) if parts else 0.0


def evaluation_line(episodes: Sequence[Episode], iteration: int, mode: str) -> dict[str, Any]:
    """One line of metrics.jsonl about held-out episodes."""
    final = [episode for episode in final_episodes(list(episodes)) if episode.finished]
    by_kind: dict[str, list[int]] = {}
    for episode in final:
        counts = by_kind.setdefault(episode.kind, [0, 0])
        counts[0] += episode.outcome == "success"
        counts[1] += 1
    numbers = episode_numbers(episodes)
    return {
        "kind": "eval",
        "iteration": iteration,
        "mode": mode,
        "episodes": numbers.pop("played"),
        "successes": sum(counts[0] for counts in by_kind.values()),
        **numbers,
        "by_kind": dict(sorted(by_kind.items())),
    }
