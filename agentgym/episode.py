"""What an episode is, and the run directory that keeps it: the log is the product.

    runs/<name>/run.toml         what was run: enough to run it again
    runs/<name>/episodes.jsonl   one line a finished attempt, flushed at once, fsynced in groups
    runs/<name>/arrays.bin       token ids and log-probabilities, referred to as [dtype, offset, count]
    runs/<name>/summary.json     metrics with intervals

A torn last line (the writer was killed) is dropped with a notice; damage before it is an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import msgspec
import numpy as np
import tomli_w

from agentgym.errors import DataError, UsageError

SCHEMA = 1
EPISODES = "episodes.jsonl"
ARRAYS = "arrays.bin"
CONFIG = "run.toml"
SUMMARY = "summary.json"


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One action of one role: what was seen, what was said, what came of it.

    Attributes:
        observation: text seen before acting.
        role: who acted.
        state_key, admissible, extra: info at that time (before acting).
        completion: the text given to `step`, exactly.
        action: the parsed action where it differs from the completion, else None.
        messages: chat messages of the prompt after the first `kept_messages`, which equal the previous turn's.
        kept_messages: see `messages`.
        arrays: "prompt_ids" (int32, the ids after the first `kept_ids`, which equal the previous turn's prompt and
            completion), "completion_ids" (int32), "logprobs" (float32, one a completion token), as sampled.
        kept_ids: see `arrays`.
        policy: name of the policy that acted, where a run has several.
        policy_version: number of updates the policy had seen.
        hinted: the expert's action was shown to the policy.
        usage: tokens and cost of this turn, by name.
        reward, valid, feedback, score, terminated, truncated: what the environment answered.
        new_checkpoints: intermediate goals that this action reached.
        policy_seconds, env_seconds: wall time.
    """

    observation: str
    completion: str
    action: str | None = None
    reward: float = 0.0
    role: str = "agent"
    valid: bool = True
    score: float | None = None
    terminated: bool = False
    truncated: bool = False
    state_key: str = ""
    admissible: tuple[str, ...] | None = None
    new_checkpoints: tuple[str, ...] = ()
    feedback: str = ""
    extra: dict[str, Any] = {}
    messages: list[dict[str, Any]] | None = None
    kept_messages: int = 0
    arrays: dict[str, Any] = {}
    kept_ids: int = 0
    policy: str = ""
    policy_version: int = 0
    hinted: bool = False
    usage: dict[str, float] = {}
    policy_seconds: float = 0.0
    env_seconds: float = 0.0


class Episode(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One attempt at one episode.

    Attributes:
        episode_id: "task#seed#repeat": the same in every run with the same plan.
        attempt: 0 for the first; faults may be retried.
        outcome: "success", "failure", "unknown" (ended without a verdict) or "fault" (no reward, not counted).
        cause: why it ended: "goal", "turn limit", "ended", or the kind of the fault.
        message: detail of a fault.
        turns: all turns, of all roles, in order.
        final_observation, final: what was left to see after the last turn, with the last info.
        total_reward: sum of the turns' rewards; None for a fault.
        score: last score; None while unknown and for a fault.
        parent_id, fork_turn: the episode and turn this one was forked from.
        twin_of: the episode whose task, seed and random draws this one shares.
        group: label of the group it was sampled in.
        policies: role -> policy name.
        metrics: family-specific numbers, from the last info.
        usage: totals by who spent them: agent, teacher, judge, opponent, inner.
        seconds: wall time from reset to end.
    """

    episode_id: str
    task_id: str
    env: str
    seed: int
    repeat: int = 0
    attempt: int = 0
    kind: str = ""
    split: str = ""
    outcome: Literal["success", "failure", "unknown", "fault"]
    cause: str = ""
    message: str = ""
    total_reward: float | None = None
    score: float | None = None
    turns: list[Turn] = []
    final_observation: str = ""
    final: dict[str, Any] = {}
    policies: dict[str, str] = {}
    group: str = ""
    parent_id: str = ""
    fork_turn: int = -1
    twin_of: str = ""
    metrics: dict[str, float] = {}
    usage: dict[str, dict[str, float]] = {}
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it ended with a verdict of the environment, not with a fault."""
        return self.outcome != "fault"


class TaskSetRecord(msgspec.Struct, kw_only=True):
    """Which task set a run played."""

    name: str
    version: str
    digest: str
    licence: str = ""
    source: str = ""


class RunConfig(msgspec.Struct, kw_only=True):
    """Everything needed to run it again; `run.toml`.

    Attributes:
        schema: version of the run directory's format.
        env, env_kwargs: id and options of the environment.
        task_set: name, version and digest of its task set.
        split: the split played.
        tasks: ids of the tasks, in order.
        repeats: episodes a task.
        seed: seed of every reset.
        policies: role -> description of the policy.
        retries: times a faulted episode is tried again.
        reset_timeout, step_timeout: seconds.
        versions: versions of the packages that matter.
        created: ISO date and time, UTC.
        name: name of the run.
    """

    schema: int = SCHEMA
    name: str = ""
    created: str = ""
    env: str
    env_kwargs: dict[str, Any] = {}
    task_set: TaskSetRecord
    split: str
    seed: int = 0
    repeats: int = 1
    retries: int = 0
    reset_timeout: float = 0.0
    step_timeout: float = 0.0
    policies: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    tasks: list[str] = []

    def episode_ids(self) -> list[str]:
        """Ids of all episodes of the plan, in order."""
        return [make_episode_id(task, self.seed, repeat) for task in self.tasks for repeat in range(self.repeats)]


def make_episode_id(task_id: str, seed: int, repeat: int) -> str:
    """The id of an episode."""
    return f"{task_id}#{seed}#{repeat}"


def write_config(run: Path, config: RunConfig) -> None:
    """Writes run.toml whole or not at all."""
    data = _without_none(msgspec.to_builtins(config))
    write_atomically(run / CONFIG, tomli_w.dumps(data, multiline_strings=False).encode())


def _without_none(value: Any) -> Any:
    """TOML has no null: an option that is None is left out, which says the same."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def read_config(run: Path) -> RunConfig:
    """Reads run.toml.

    Raises:
        DataError: if it is missing, damaged, or of another schema version.
    """
    path = run / CONFIG
    if run.is_file():
        raise DataError(run, "a file, not a run directory", f"Give its folder: {run.parent}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            path, "no such file", "Give the folder that `agentgym eval` printed; it holds run.toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(
            path, f"cannot be read ({error})", "Restore it from a copy, or run the evaluation again"
        ) from error
    if data.get("schema") != SCHEMA:
        raise DataError(
            path,
            f"run directory of schema {data.get('schema')!r}, this version reads schema {SCHEMA}",
            "Read it with the agentgym version named under [versions], or run the evaluation again",
        )
    try:
        return msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        raise DataError(
            path, f"not a run configuration ({error})", "Restore it from a copy, or run the evaluation again"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a whole file or leaves the old one."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            path, "the disk is full", "Free some space and continue with --resume: finished episodes are kept"
        )
    return DataError(
        path,
        f"cannot be written ({error.strerror})",
        "Check the path and its permissions; a run that was interrupted continues with --resume",
    )


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Episode)


def scan_episodes(run: Path, *, notice: Callable[[str], None] | None = None) -> Iterator[tuple[Episode, int]]:
    """Episodes in the order of writing, each with the file offset after its line.

    Args:
        run: run directory.
        notice: told when a torn last line is dropped.

    Raises:
        DataError: for a damaged line that is not the last, naming it.
    """
    path = run / EPISODES
    if not path.exists():
        return
    if not path.is_file():
        raise DataError(path, "not a file", "Give the folder that `agentgym eval` printed")
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n"):
                    raise msgspec.DecodeError("the line has no end")
                episode = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if file.read(1) == b"":
                    if notice is not None:
                        notice(
                            f"{path}: dropped the torn last line ({number}); that episode will be run again on --resume"
                        )
                    return
                raise DataError(
                    path,
                    f"line {number} is damaged ({error})",
                    f"Delete that line (sed -i '{number}d') to lose this one episode, then --resume runs it again",
                ) from error
            end += len(line)
            yield episode, end


def read_episodes(run: Path, *, notice: Callable[[str], None] | None = None, arrays: bool = False) -> list[Episode]:
    """All attempts of a run, in the order of writing.

    Args:
        run: run directory.
        notice: told when a torn last line is dropped.
        arrays: load token arrays from the sidecar too; otherwise they stay references.

    Raises:
        DataError: if the directory is damaged.
    """
    episodes = [episode for episode, _ in scan_episodes(run, notice=notice)]
    if arrays:
        _load_arrays(run, episodes)
    return episodes


def final_episodes(episodes: list[Episode]) -> list[Episode]:
    """The last attempt of each episode, sorted by episode id."""
    last: dict[str, Episode] = {}
    for episode in episodes:
        if episode.episode_id not in last or not last[episode.episode_id].finished:
            last[episode.episode_id] = episode
    return [last[key] for key in sorted(last)]


def _load_arrays(run: Path, episodes: list[Episode]) -> None:
    path = run / ARRAYS
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.exists() and path.stat().st_size else np.empty(0, np.uint8)
    for episode in episodes:
        for turn in episode.turns:
            for name, (dtype, offset, count) in list(turn.arrays.items()):
                end = offset + count * np.dtype(dtype).itemsize
                if not 0 <= offset <= end <= len(data):
                    raise DataError(
                        path,
                        f"array {name} of {episode.episode_id} lies outside the file",
                        "Restore it from a copy",
                    )
                turn.arrays[name] = np.frombuffer(data[offset:end].tobytes(), dtype=dtype)


class RunWriter:
    """Appends episodes to a run directory; one writer at a time.

    Args:
        run: directory, made if missing.
        config: what is being run.
        resume: continue a directory that holds a part of the same run.
        sync_seconds: an fsync happens at most this often, and at the end.

    Raises:
        UsageError: if the directory holds a run and `resume` is False, or another run and it is True.
        DataError: if the directory is damaged or cannot be written.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        *,
        resume: bool = False,
        sync_seconds: float = 1.0,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.done: dict[str, list[Episode]] = {}
        self._sync_seconds = sync_seconds
        self._last_sync = time.monotonic()
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._lock = open(run / ".lock", "wb")  # noqa: SIM115 - held as long as the writer
        except OSError as error:
            raise _write_error(run, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(
                f"{run} is being written by another process; wait for it or choose another --out"
            ) from None
        try:
            self._open(resume, notice)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, resume: bool, notice: Callable[[str], None] | None) -> None:
        end = array_end = 0
        if (self.run / CONFIG).exists():
            if not resume:
                raise UsageError(f"{self.run} already holds a run; continue it with --resume, or choose another --out")
            _check_same_run(read_config(self.run), self.config)
            arrays = self.run / ARRAYS
            kept_arrays = arrays.stat().st_size if arrays.exists() else 0
            for episode, line_end in scan_episodes(self.run, notice=notice):
                needs = max(array_end, _arrays_end(episode))
                if needs > kept_arrays:  # the machine went down before they reached the disk
                    if notice is not None:
                        notice(
                            f"{arrays}: lacks the token arrays from {episode.episode_id} on; played again from there"
                        )
                    break
                end, array_end = line_end, needs
                self.done.setdefault(episode.episode_id, []).append(episode)
        elif (self.run / EPISODES).exists():
            raise DataError(
                self.run / CONFIG,
                "missing beside episodes.jsonl",
                "Restore it from a copy, or choose another --out",
            )
        else:
            write_config(self.run, self.config)
        try:
            self._episodes = _open_at(self.run / EPISODES, end)
            self._arrays = _open_at(self.run / ARRAYS, array_end)
        except OSError as error:
            raise _write_error(self.run, error) from error
        self._end, self._array_end = end, array_end

    def append(self, episode: Episode) -> None:
        """Writes one finished attempt and flushes it.

        Raises:
            DataError: if the disk is full or the file cannot be written; what was written before is kept.
        """
        blobs: list[bytes] = []
        position = self._array_end

        def place(value: Any) -> Any:
            nonlocal position
            array = np.ascontiguousarray(value)
            blobs.append(array.tobytes())
            reference = [array.dtype.str, position, array.size]
            position += array.nbytes
            return reference

        line = msgspec.json.encode(episode, enc_hook=place) if _has_arrays(episode) else _encoder.encode(episode)
        try:
            if blobs:
                _write_all(self._arrays, b"".join(blobs))
            _write_all(self._episodes, line + b"\n")
            now = time.monotonic()
            if now - self._last_sync >= self._sync_seconds:
                self.sync()
        except OSError as error:
            _cut(self._episodes, self._end)
            _cut(self._arrays, self._array_end)
            raise _write_error(self.run / EPISODES, error) from error
        self._end += len(line) + 1
        self._array_end = position

    def sync(self) -> None:
        """Puts everything written so far on the disk itself."""
        os.fsync(self._arrays.fileno())
        os.fsync(self._episodes.fileno())
        self._last_sync = time.monotonic()

    def close(self) -> None:
        """Syncs and lets go of the directory."""
        if self._lock.closed:
            return
        try:
            self.sync()
        except OSError as error:
            raise _write_error(self.run / EPISODES, error) from error
        finally:
            self._episodes.close()
            self._arrays.close()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _arrays_end(episode: Episode) -> int:
    """Where the arrays of an episode, as references, end in the sidecar."""
    references = (reference for turn in episode.turns for reference in turn.arrays.values())
    return max((offset + count * np.dtype(dtype).itemsize for dtype, offset, count in references), default=0)


def _has_arrays(episode: Episode) -> bool:
    return any(turn.arrays for turn in episode.turns)


def _open_at(path: Path, end: int) -> BinaryIO:
    """Opens for appending after `end`; what lies behind is the rest of a torn write."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115 - the writer owns it; unbuffered, nothing is written late
    if file.tell() > end:
        file.truncate(end)
    elif file.tell() < end:
        file.close()
        raise DataError(path, "shorter than episodes.jsonl says", "Restore it from a copy, or run the evaluation again")
    return file


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Writes everything, or raises: an unbuffered file may take a part only."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _cut(file: BinaryIO, end: int) -> None:
    """Takes back a partial write as far as possible; `--resume` would drop it too."""
    import contextlib

    with contextlib.suppress(OSError, ValueError):
        os.ftruncate(file.fileno(), end)


def _check_same_run(old: RunConfig, new: RunConfig) -> None:
    for field in ("env", "env_kwargs", "task_set", "split", "seed", "repeats", "policies", "tasks"):
        before, now = msgspec.to_builtins(getattr(old, field)), msgspec.to_builtins(getattr(new, field))
        if before != now:
            shown = "" if field == "tasks" else f" (there {before!r}, now {now!r})"
            raise UsageError(f"--resume must continue the same run, but {field} differs{shown}; choose another --out")
