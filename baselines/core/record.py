"""What a training run leaves: metrics.jsonl, trackers, and its state for those who watch.

In the folder of a run:

    train.toml       the configuration
    metrics.jsonl    one line an iteration and an evaluation
    status.json      running, finished or stopped, with the reason
    checkpoints/     see checkpoint.py
    stopped/         the weights that a guard did not let pass
    episodes.jsonl   with save_episodes = true, a run directory as `agentgym eval` leaves it
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from agentgym.baselines.core.config import TrainConfig
from agentgym.episode import ARRAYS, EPISODES, Episode, RunWriter, write_atomically
from agentgym.episode import CONFIG as RUN
from agentgym.errors import DataError, UsageError, require_extra
from agentgym.evaluate import plan

METRICS = "metrics.jsonl"
STATUS = "status.json"
CONFIG = "train.toml"


class Recorder:
    """Appends to metrics.jsonl, and passes numbers on to trackers.

    Args:
        out: folder of the run.
        config: its configuration.
        iteration: with a value, lines of later iterations are dropped: the run goes on from there.
    """

    def __init__(self, out: Path, config: TrainConfig, iteration: int | None = None) -> None:
        self._path = out / METRICS
        kept = [] if iteration is None else [line for line in read_metrics(out) if line["iteration"] <= iteration]
        write_atomically(self._path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
        self._file = open(self._path, "ab")  # noqa: SIM115 - open as long as the run
        self._board: Any = None
        self._wandb: Any = None
        if "tensorboard" in config.trackers:
            require_extra("tensorboard", extra="train")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=iteration)
        if "wandb" in config.trackers:
            wandb = require_extra("wandb", extra="wandb")
            self._wandb = wandb.init(project="agentgym", name=out.name, dir=str(out), resume="allow")

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line at once."""
        self._file.write(msgspec.json.encode(line, enc_hook=plain_number) + b"\n")
        self._file.flush()
        kind = line["kind"] + ("/" + line["mode"] if "mode" in line else "")
        numbers = {
            f"{kind}/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float) and name != "iteration"
        }
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, line["iteration"])
        if self._wandb is not None:
            self._wandb.log({**numbers, "iteration": line["iteration"]})

    def close(self) -> None:
        """Puts everything on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class EpisodeLog:
    """Writes every attempt of training to episodes.jsonl, with its token arrays, as a run directory.

    Attempts that a continued run plays again are there already and stay as they are.

    Args:
        out: folder of the run.
        config: its configuration.
        resume: continue the file.
    """

    def __init__(self, out: Path, config: TrainConfig, *, resume: bool) -> None:
        planned = plan(config.env, env_kwargs=config.env_kwargs, split=config.train_split, episodes=1)
        planned = msgspec.structs.replace(planned, name=out.name, retries=config.retries, tasks=[])
        if not resume:
            for name in (EPISODES, ARRAYS, RUN):  # of a run that was killed before its first checkpoint
                (out / name).unlink(missing_ok=True)
        self._writer = RunWriter(out, planned, resume=resume)
        done = self._writer.done.values()
        self._known = {(episode.episode_id, episode.attempt) for attempts in done for episode in attempts}

    def write(self, episodes: Iterable[Episode]) -> None:
        """Appends the attempts that are not there yet."""
        for episode in episodes:
            if (episode.episode_id, episode.attempt) not in self._known:
                self._writer.append(episode)

    def close(self) -> None:
        """Puts everything on the disk."""
        self._writer.close()


def plain_number(value: Any) -> Any:
    """A number of numpy or a tensor of one as a plain number, for JSON; arrays as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON knows")


def lock(out: Path) -> BinaryIO:
    """Takes a run's folder for this process until the file is closed.

    Raises:
        UsageError: if another process trains in it.
    """
    file = open(out / ".training", "wb")  # noqa: SIM115 - held as long as the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"{out} is used by another training; wait for it, or choose another --out") from None
    return file


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl; a torn last line is left out.

    Raises:
        DataError: if a line before it is damaged.
    """
    path = out / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(msgspec.json.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise DataError(path, f"line {number} is damaged ({error})", f"Delete it: sed -i '{number}d'") from error
    return found


def write_status(out: Path, state: str, *, reason: str = "", **more: Any) -> None:
    """Says what became of the run."""
    write_atomically(out / STATUS, msgspec.json.encode({"state": state, "reason": reason, **more}))


def read_status(out: Path) -> dict[str, Any]:
    """What became of a run; {"state": "new"} if nothing did."""
    path = out / STATUS
    try:
        status: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {"state": "new", "reason": ""}
    except msgspec.DecodeError as error:
        raise DataError(path, f"is damaged ({error})", "Delete it; the run continues from its checkpoint") from error
    return status
