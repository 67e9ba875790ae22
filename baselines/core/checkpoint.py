"""Checkpoints: a folder that is complete or is not there.

In the folder of a run:

    checkpoints/000020/model-policy/    weights (or adapters) and tokenizer: loads by its path
    checkpoints/000020/trainer.pt       optimiser, copies, method state, counters
    model -> the newest model-policy
"""

from __future__ import annotations

import os
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec
import torch

from agentgym.baselines.core.models import save_model
from agentgym.baselines.core.record import plain_number
from agentgym.errors import DataError, UsageError
from agentgym.policies.hf import SETTINGS

FOLDER = "checkpoints"
STATE = "trainer.pt"
MODEL = "model"


def save(
    out: Path,
    iteration: int,
    models: dict[str, tuple[Any, Any, str]],
    state: dict[str, Any],
    keep: int,
    settings: dict[str, Any],
) -> Path:
    """Writes a checkpoint and removes older ones.

    Args:
        out: folder of the run.
        iteration: iterations done.
        models: name of a subfolder -> model, tokenizer and name of the adapter ("" for all).
        state: of the trainer.
        keep: how many checkpoints stay.
        settings: of prompt and sampling, left beside the weights for those who play with them.
    """
    folder = out / FOLDER
    for torn in folder.glob(".*.part"):
        shutil.rmtree(torn)
    final = _unused(folder / f"{iteration:06d}")
    part = folder / f".{final.name}.part"
    part.mkdir(parents=True)
    for name, (model, tokenizer, adapter) in models.items():
        save_model(model, tokenizer, part / name, adapter)
        (part / name / SETTINGS).write_bytes(msgspec.json.encode(settings))
    torch.save({**state, "method_state": encode_state(state["method_state"])}, part / STATE)
    _sync(*part.rglob("*"), part)  # on the disk before it has its name
    part.rename(final)
    _sync(folder)
    _point(out / MODEL, Path(FOLDER) / final.name / next(iter(models)))
    for old in list_checkpoints(out)[:-keep]:
        shutil.rmtree(old)
    return final


def _unused(path: Path) -> Path:
    """A free name that sorts behind `path`: a checkpoint is never removed before another one is complete."""
    names = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(1)))
    return next(name for name in names if not name.exists())


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def encode_state(state: Any) -> bytes:
    """A method's state as JSON; numbers of numpy become plain ones."""
    try:
        return msgspec.json.encode(state, enc_hook=plain_number)
    except (TypeError, msgspec.MsgspecError) as error:
        raise UsageError(f"the method's state() cannot be saved ({error}); make it of what JSON knows") from error


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
        state["method_state"] = msgspec.json.decode(state["method_state"])
    except Exception as error:
        raise DataError(
            checkpoint / STATE,
            f"cannot be read ({error})",
            "Remove this checkpoint's folder; an older one is used then",
        ) from error
    return state
