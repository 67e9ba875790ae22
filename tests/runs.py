"""Small run directories for tests of metrics and reports, with numbers that can be worked out by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

from agentgym.episode import Episode, RunConfig, RunWriter, TaskSetRecord, Turn, make_episode_id

Outcome = Literal["success", "failure", "unknown", "fault"]

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


def make_config(tasks: list[str] | None = None, *, name: str = "run", repeats: int = 1, **changes: Any) -> RunConfig:
    """A configuration of a run of `tasks`."""
    fields: dict[str, Any] = {
        "name": name,
        "created": "2026-01-02T03:04:05+00:00",
        "env": "agentgym/Count-v0",
        "task_set": TaskSetRecord(name="count/tasks", version="1", digest="0123456789abcdef" * 4, licence="Apache-2.0"),
        "split": "test",
        "repeats": repeats,
        "policies": {"*": {"spec": name}},
        "versions": {"agentgym": "0.1.0"},
        "tasks": tasks or [],
    }
    return RunConfig(**(fields | changes))


def make_episode(task: str, outcome: Outcome, turns: int = 2, *, repeat: int = 0, **changes: Any) -> Episode:
    """An episode of `turns` turns; a success has score 1, a failure 0."""
    verdict = {"success": 1.0, "failure": 0.0}.get(outcome)
    fields: dict[str, Any] = {
        "episode_id": make_episode_id(task, 0, repeat),
        "task_id": task,
        "env": "agentgym/Count-v0",
        "seed": 0,
        "repeat": repeat,
        "kind": "even",
        "split": "test",
        "outcome": outcome,
        "cause": {"success": "goal", "failure": "turn limit", "unknown": "ended"}.get(outcome, "crash"),
        "score": verdict,
        "total_reward": verdict,
        "turns": [Turn(observation=f"You see {i}.", completion=f"go {i}") for i in range(turns)],
        "final_observation": "The end.",
    }
    return Episode(**(fields | changes))


def write_run(path: Path, config: RunConfig, episodes: list[Episode]) -> Path:
    """Writes a run directory."""
    with RunWriter(path, config) as writer:
        for episode in episodes:
            writer.append(episode)
    return path


def household_run(path: Path, skill: float, *, size: int = 200, tokens: bool = False) -> Path:
    """A run of `size` household tasks of six kinds, solved with about the probability `skill`."""
    rng = random.Random(int(1000 * skill))
    tasks = [f"household/{KINDS[i % 6]}-{i:04}" for i in range(size)]
    episodes = []
    for i, task in enumerate(tasks):
        solved = rng.random() < skill * (1 - 0.08 * (i % 6))
        length = rng.randint(6, 22) if solved else 50
        turns = [
            Turn(
                observation=f"You arrive at drawer {t}. The drawer {t} is open. In it, you see a saltshaker 1, a "
                f"dishsponge {t}, a spoon 3 and a butterknife 2. You have nothing in your hands.",
                completion=f"take dishsponge {t} from drawer {t}",
                valid=rng.random() < 0.5 + skill / 2,
                reward=1.0 if solved and t == length - 1 else 0.0,
            )
            for t in range(length)
        ]
        outcome: Outcome = "success" if solved else "failure"
        usage = {"agent": {"prompt_tokens": 900.0 * length, "completion_tokens": 40.0 * length, "cost": 0.002 * length}}
        episode = make_episode(task, outcome, kind=KINDS[i % 6], usage=usage if tokens else {})
        episode.turns = turns
        if i % 67 == 3:
            kept = {"message": "the simulator did not answer within 60 s", "score": None, "total_reward": None}
            episodes.append(make_episode(task, "fault", 3, kind=KINDS[i % 6], cause="step timeout", **kept))
            episode.attempt = 1
        episodes.append(episode)
    return write_run(path, make_config(tasks, name=path.name), episodes)
