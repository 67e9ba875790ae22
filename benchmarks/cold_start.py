"""What the trainer's benchmarks share: a tiny model that imitated the expert for a moment, and the study world's RL."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentgym.baselines.core.config import TrainConfig, read_train_config
from agentgym.baselines.core.run import quiet
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.core.trainer import Trainer, train

CONFIGS = Path(__file__).resolve().parents[1] / "baselines" / "configs"
IMITATION = 20  # iterations of the short cold start; the study's takes about 40


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark of the trainer."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="", help="a cold start's model folder; made here if left out")
    return made


@contextlib.contextmanager
def workplace(model: str) -> Iterator[tuple[Path, str]]:
    """A folder for a benchmark's runs, and the model to start from; one thread, no progress bars."""
    import torch

    torch.set_num_threads(1)
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), model or _cold_start(Path(folder, "cold"))


def _cold_start(out: Path) -> str:
    """Imitates the expert for about a minute."""
    print(f"cold start: {IMITATION} iterations of imitation", flush=True)
    evaluation = {"every": 0, "final": 256, "greedy": False, "stop_at": 0.0}

    def watch(line: dict[str, Any]) -> None:
        if line["kind"] == "eval":
            print(f"it wins {line['success']:.1%} of held-out games", flush=True)

    config = read_train_config(CONFIGS / "alfworld-s-sft.toml", iterations=IMITATION, evaluation=evaluation)
    train(config, out, watch=watch)
    return str(out / "model")


def reinforce(model: str, **changes: Any) -> TrainConfig:
    """The study's configuration, without evaluations and checkpoints on the way.

    Args:
        model: folder of the cold start.
        **changes: further settings.
    """
    evaluation = {"every": 0, "final": 1, "greedy": False}
    return read_train_config(
        CONFIGS / "alfworld-s.toml", **{"model": model, "evaluation": evaluation, "checkpoint_every": 0, **changes}
    )


def keep_played(trainer: Trainer) -> list[list[Trajectory]]:
    """A list that grows by the trajectories of each iteration of a run."""
    played: list[list[Trajectory]] = []
    estimate = trainer.method.turn_advantages

    def keep(trajectories: Sequence[Trajectory]) -> list[Any]:
        played.append(list(trajectories))
        return estimate(trajectories)

    setattr(trainer.method, "turn_advantages", keep)  # noqa: B010 - a method cannot be assigned
    return played
