"""Runs the runs of a study: one process each, with one thread, several at a time, over as many sittings as it takes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import tomli_w
from rich.console import Console

from agentgym.baselines.study.plan import PlannedRun, model_digests
from agentgym.baselines.study.progress import StudyProgress, Tail
from agentgym.baselines.study.summary import METRICS, code_digest, read_record, read_summary, summarise, write_summary
from agentgym.episode import write_atomically
from agentgym.errors import DataError

TRAINER = (sys.executable, "-m", "agentgym.baselines.core.run")
_ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}
_LAST_LINES = 12
_GRACE = 15.0  # seconds that a run has to end in after it was asked to


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a run that failed, until it succeeds.

    Attributes:
        id, method, cold_start, seed: of the run.
        exit_code: of its process; negative where a signal ended it.
        iteration: the last finished one.
        reason: the last line that it wrote.
    """

    id: str
    method: str
    cold_start: str
    seed: int
    exit_code: int
    iteration: int
    reason: str


class Tally(NamedTuple):
    """How a sitting ended: ids of runs."""

    finished: list[str]
    failed: list[str]
    busy: list[str]  # held by another process
    left: list[str]  # not started in the time of the sitting


class _Running:
    """A run's process; its log is locked as long as it lives, also beyond the life of this one."""

    def __init__(self, run: PlannedRun, process: subprocess.Popen[bytes], folder: Path, code: str) -> None:
        self.run = run
        self.code = code
        self.process = process
        self.folder = folder
        self.tail = Tail(folder / METRICS)

    def signal(self, number: int) -> None:
        """Sends a signal to the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def unfinished(
    runs: Sequence[PlannedRun], results: Path, digests: Mapping[str, str | None] | None = None
) -> list[PlannedRun]:
    """The runs that have no summary yet.

    Args:
        runs: as planned.
        results: folder of the study's results.
        digests: of the models by folder, see `agentgym.baselines.study.plan.model_digests`.

    Raises:
        DataError: for a summary that does not belong to the plan.
    """
    return [run for run in runs if read_summary(results, run, digests) is None]


def drive(
    runs: Sequence[PlannedRun],
    out: Path,
    results: Path,
    *,
    name: str,
    parallel: int,
    sitting: float | None = None,
    command: Sequence[str] = TRAINER,
    console: Console | None = None,
    poll: float = 0.5,
) -> Tally:
    """Does all runs that have no summary, and writes the summary of each that ends well.

    A failed run does not stop the others; it is tried again in the next sitting. A KeyboardInterrupt stops the
    running ones, which the next sitting continues.

    Args:
        runs: as planned.
        out: folder of the trainer's files, one subfolder a run.
        results: folder of the summaries.
        name: of the study.
        parallel: processes at a time.
        sitting: minutes after which no run is started any more.
        command: the trainer; "CONFIG.toml --out DIR [--resume]" is added.
        console: for the progress.
        poll: seconds between two looks at the processes.

    Raises:
        DataError: before anything is started, for summaries or folders that do not belong to the plan, and where a
            model is absent.
    """
    waiting = unfinished(runs, results, model_digests(runs, needed=False))
    digests = model_digests(waiting)
    for run in waiting:
        _config_text(run, out, digests)
    tally = Tally([], [], [], [])
    running: list[_Running] = []
    deadline = time.monotonic() + 60 * sitting if sitting is not None else float("inf")
    with StudyProgress(console or Console(stderr=True), name, waiting) as progress:
        try:
            while waiting or running:
                while waiting and len(running) < parallel and time.monotonic() < deadline:
                    run = waiting.pop(0)
                    begun = _begin(run, out, digests, command, progress)
                    if begun is None:
                        tally.busy.append(run.id)
                        progress.end(run, "another process is running it")
                    else:
                        running.append(begun)
                if not running:
                    break
                time.sleep(poll)
                for each in list(running):
                    each.tail.read()
                    progress.advance(each.run, each.tail)
                    if each.process.poll() is not None:
                        running.remove(each)
                        well = _end(each, out, results, digests, progress)
                        (tally.finished if well else tally.failed).append(each.run.id)
        finally:
            _stop(running)
    tally.left.extend(run.id for run in waiting)
    return tally


def _config_text(run: PlannedRun, out: Path, digests: Mapping[str, str | None]) -> bytes:
    """The trainer's settings as a file; refuses a folder that was begun with others."""
    head = "".join(f"# {model} with digest {digests[model]}\n" for model in run.models)
    text = (head + tomli_w.dumps(run.config)).encode()
    path = out / f"{run.id}.toml"
    if path.exists() and path.read_bytes() != text and _begun(out / run.id):
        raise DataError(
            out / run.id,
            f"was begun with other settings or from another model than planned now (see {path.name} beside it)",
            "Remove the folder to begin the run anew, restore the study file, or choose another --out",
        )
    return text


def _begun(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _begin(
    run: PlannedRun, out: Path, digests: Mapping[str, str | None], command: Sequence[str], progress: StudyProgress
) -> _Running | None:
    """Starts the process of a run, or returns None if one is alive already."""
    out.mkdir(parents=True, exist_ok=True)
    folder, config = out / run.id, out / f"{run.id}.toml"
    with open(out / f"{run.id}.log", "ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shared with the process, which holds it until its end
        except OSError:
            return None
        write_atomically(config, _config_text(run, out, digests))
        resumed, code = _begun(folder), code_digest()
        arguments = [*command, str(config), "--out", str(folder), *(["--resume"] if resumed else [])]
        log.write(f"$ {' '.join(arguments)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the runs in order
        )
    progress.begin(run, resumed=resumed)
    return _Running(run, process, folder, code)


def _end(each: _Running, out: Path, results: Path, digests: Mapping[str, str | None], progress: StudyProgress) -> bool:
    """Writes the summary of a run that ended well, or shows and keeps why it failed."""
    run, code = each.run, each.process.returncode
    failure = results / "runs" / f"{run.id}.failed.json"
    lines = _last_lines(out / f"{run.id}.log")
    try:
        if code == 0:
            summary = summarise(run, each.folder, digests=digests, code=each.code)
            write_summary(results, summary)
            failure.unlink(missing_ok=True)
            progress.end(run, f"done, held-out {100 * summary.sampled.success:.1f}%")
            return True
    except DataError as error:
        lines = [str(error)]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    progress.end(run, f"FAILED, {how}; the others go on", "\n".join(f"  {line}" for line in lines))
    failure.parent.mkdir(parents=True, exist_ok=True)
    record = Failure(
        id=run.id,
        method=run.method.name,
        cold_start=run.cold_start.name,
        seed=run.seed,
        exit_code=code,
        iteration=each.tail.iteration,
        reason=(lines[-1] if lines else "").replace(os.getcwd(), ".")[:300],
    )
    write_atomically(failure, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return False


def _last_lines(log: Path) -> list[str]:
    """The end of what the last process of a run wrote, without the command."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - 8192))
        lines = file.read().decode(errors="replace").splitlines()
    begun = max((place for place, line in enumerate(lines) if line.startswith("$ ")), default=-1)
    return [line for line in lines[begun + 1 :] if line.strip()][-_LAST_LINES:]


def _stop(running: Sequence[_Running]) -> None:
    """Asks processes to end, and kills those that do not."""
    for each in running:
        each.signal(signal.SIGTERM)
    try:
        deadline = time.monotonic() + _GRACE
        for each in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.1, deadline - time.monotonic()))
    finally:  # also after a second Ctrl-C
        for each in running:
            if each.process.poll() is None:
                each.signal(signal.SIGKILL)
                each.process.wait()


def read_failures(results: Path) -> list[Failure]:
    """The failures kept in a study's results, by id.

    Raises:
        DataError: for a file that is damaged.
    """
    paths = sorted((results / "runs").glob("*.failed.json"))
    return [read_record(path, Failure, "record of a failed run") for path in paths]
