"""Checkpoints: a folder that is complete or is not there.

    checkpoints/000020/model-policy/    weights (or adapters) and tokenizer: loads by its path
    checkpoints/000020/trainer.pt       optimiser, copies, method state, counters
    model -> the newest model-policy
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from agentgym.baselines.core.models import save_model
from agentgym.errors import DataError

FOLDER = "checkpoints"
STATE = "trainer.pt"
MODEL = "model"


def save(out: Path, iteration: int, models: dict[str, tuple[Any, Any]], state: dict[str, Any], keep: int) -> Path:
    """Writes a checkpoint and removes older ones.

    Args:
        out: folder of the run.
        iteration: iterations done.
        models: name of a subfolder -> model and tokenizer.
        state: of the trainer.
        keep: how many checkpoints stay.
    """
    folder = out / FOLDER
    final = folder / f"{iteration:06d}"
    part = folder / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, (model, tokenizer) in models.items():
        save_model(model, tokenizer, part / name)
    torch.save(state, part / STATE)
    for path in [*part.rglob("*"), part]:  # on the disk before it has its name
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    _point(out / MODEL, Path(FOLDER) / final.name / next(iter(models)))
    for old in list_checkpoints(out)[:-keep]:
        shutil.rmtree(old)
    return final


def _point(link: Path, target: Path) -> None:
    """Makes `link` lead to the newest weights, whatever a kill leaves behind."""
    part = link.with_name(f".{link.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(link)


def list_checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    folder = out / FOLDER
    return sorted(path for path in folder.glob("[0-9]*") if (path / STATE).is_file()) if folder.is_dir() else []


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            checkpoint / STATE,
            f"cannot be read ({error})",
            "Remove this checkpoint's folder; an older one is used then",
        ) from error
    return state
