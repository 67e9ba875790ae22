"""The same games played by the `alfworld` and `textworld` packages themselves, each in a process of its own.

The reference is not thread-safe, keeps the memory of every environment object it ever made, overwrites `sys.argv`
and swaps `sys.stdout`; its planner can run for ever and cannot be interrupted. Hence one child process for each
environment, with time limits, ended with its owner.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.envs.alfworld.game import GAME_FILE, TRAJECTORY_FILE
from agentgym.envs.alfworld.wording import NOTHING_HAPPENS, TASK_PREFIX
from agentgym.errors import DataError, InfrastructureError, UsageError, require_extra

_WORKER = Path(__file__).with_name("textworld_worker.py")
_FRAGMENT = 1 << 16

Source = Path | str | Mapping[str, bytes]


class TextWorldEngine:
    """One play of a game by the reference. It has no snapshots.

    Args:
        source: folder of the game, its `game.tw-pddl`, or the contents of `game.tw-pddl` and `traj_data.json` by
            file name.
        package_expert: asks the package's hand-coded expert for its next command at each step, see `expert_command`.
        shuffle: the reference's `domain_randomization`: numbers are shuffled within a class.
        seed: seed of the child's global random generator, which the shuffling and the expert use.
        load_timeout: seconds for starting the process and loading the game.
        step_timeout: seconds for a reset or a step.

    Raises:
        MissingExtraError: if the packages are not installed.
        DataError: if the reference cannot load the game.
        InfrastructureError: if the child ends or exceeds a time limit.
    """

    def __init__(
        self,
        source: Source,
        *,
        package_expert: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        load_timeout: float = 120.0,
        step_timeout: float = 60.0,
    ) -> None:
        self._load_timeout = load_timeout
        self._step_timeout = step_timeout
        self._state: dict[str, Any] = {}
        self.valid_last = True
        self._worker = _Worker(shuffle=shuffle, expert=package_expert, seed=seed, timeout=load_timeout)
        self.load(source)

    def load(self, source: Source) -> None:
        """Changes to another game in the same process, which saves a second of imports; `reset` has to follow.

        Raises:
            DataError: if the reference cannot load the game.
            InfrastructureError: if the child ends or exceeds the time limit.
        """
        self._state = {}
        self._worker.load(source, self._load_timeout)

    def reset(self) -> str:
        """Back to the initial state; returns the first observation."""
        self._state = self._worker.ask({"kind": "reset"}, self._step_timeout)
        self.valid_last = True
        return str(self._state["feedback"])

    def step(self, command: str) -> str:
        """Carries out a command; returns its feedback.

        Raises:
            UsageError: before the first `reset`.
        """
        if not self._state:
            raise UsageError("TextWorldEngine.step was called before reset; call reset first")
        self._state = self._worker.ask({"kind": "step", "command": command}, self._step_timeout)
        feedback = str(self._state["feedback"])
        self.valid_last = feedback != NOTHING_HAPPENS
        return feedback

    @property
    def won(self) -> bool:
        """Whether the goal holds now."""
        return bool(self._state.get("won"))

    def admissible(self) -> tuple[str, ...]:
        """The commands that do something now, sorted by code point."""
        return tuple(self._state.get("admissible", ()))

    @property
    def expert_command(self) -> str | None:
        """The next command of the package's expert; None where it raised, or without `package_expert`."""
        command = self._state.get("expert")
        return None if command is None else str(command)

    @property
    def expert_error(self) -> str | None:
        """What the package's expert raised at this step."""
        error = self._state.get("expert_error")
        return None if error is None else str(error)

    @property
    def process_id(self) -> int:
        """Id of the child process."""
        return self._worker.process.pid

    @property
    def closed(self) -> bool:
        """Whether the child process has ended, by `close` or by a failure; a new engine is needed then."""
        return not self._worker.alive

    def close(self) -> None:
        """Ends the child process. Also done when the engine is garbage-collected."""
        self._worker.close()

    def __enter__(self) -> TextWorldEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def planner(source: Source, time_limit: float, *, memory_limit: int = 4 << 30) -> list[str] | None:
    """A plan of the reference's planner (Fast Downward), found in a process of its own.

    Args:
        source: as for `TextWorldEngine`.
        time_limit: seconds for everything, starting the process included.
        memory_limit: bytes of address space of the process (where the platform can limit it).

    Returns:
        Commands that win the game from its start (none if it is won there); None if no plan was found in time.

    Raises:
        MissingExtraError: if the packages are not installed.
    """
    deadline = time.monotonic() + time_limit
    limit = memory_limit if importlib.util.find_spec("resource") else 0
    try:
        worker = _Worker(plan=True, memory=limit, timeout=time_limit)
    except InfrastructureError:
        return None
    try:
        worker.load(source, max(0.0, deadline - time.monotonic()))
        state = worker.ask({"kind": "reset"}, max(0.0, deadline - time.monotonic()))
    except (DataError, InfrastructureError):
        return None
    finally:
        worker.close()
    plan = state["plan"]
    return [str(command) for command in plan] if plan or state["won"] else None


def task_of(first_observation: str) -> str:
    """The task, without its final full stop, that a first observation ends with."""
    return first_observation.rpartition(TASK_PREFIX)[2].removesuffix(".")


class _Worker:
    """The child process and the pipe to it."""

    def __init__(
        self,
        *,
        timeout: float,
        shuffle: bool = False,
        expert: bool = False,
        plan: bool = False,
        memory: int = 0,
        seed: int = 0,
    ) -> None:
        for module in ("textworld", "fast_downward", "alfworld"):
            if importlib.util.find_spec(module) is None:
                require_extra(module, extra="textworld")
        folder = tempfile.mkdtemp(prefix="alfworld-")
        try:
            self._log = open(Path(folder, "stderr.txt"), "wb")  # noqa: SIM115  # lives as long as the process
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._folder = folder
        self._rest = b""
        self._finalizer = weakref.finalize(self, _end, self.process, self._log, folder)
        request = {"kind": "start", "shuffle": shuffle, "expert": expert, "plan": plan, "seed": seed, "memory": memory}
        try:
            self.ask(request, timeout)
        except BaseException:
            self.close()
            raise

    def load(self, source: Source, timeout: float) -> None:
        file = _game_file(source, Path(self._folder))
        try:
            self.ask({"kind": "load", "file": str(file)}, timeout)
        except _ReferenceError as error:
            raise DataError(
                file, f"the reference cannot load the game ({error})", "Its goal may be unreachable; check the file."
            ) from error

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            InfrastructureError: if there is none in time; the process is ended then.
        """
        if not self._finalizer.alive:
            raise UsageError("the TextWorld process was closed; make a new TextWorldEngine")
        line = self._exchange(json.dumps(request).encode() + b"\n", time.monotonic() + timeout)
        if line is None:
            how = self._how_it_ended(timeout)
            self.close()
            raise InfrastructureError(f"{how}. Make a new TextWorldEngine, or raise its time limits.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _ReferenceError(answer["error"])
        return answer

    def _exchange(self, request: bytes, deadline: float) -> bytes | None:
        """One line for one line; None at the end of the process or of the time."""
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            return None
        try:
            stdin.write(request)
            stdin.flush()
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                fragment = os.read(stdout.fileno(), _FRAGMENT)
                if not fragment:
                    return None
                self._rest += fragment
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _how_it_ended(self, timeout: float) -> str:
        try:
            code = self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            return f"the TextWorld process gave no answer in {timeout:g} s"
        said = Path(self._folder, "stderr.txt").read_text("utf-8", "replace").strip().splitlines()
        return f"the TextWorld process ended with code {code} ({said[-1] if said else 'no message'})"

    @property
    def alive(self) -> bool:
        return self._finalizer.alive

    def close(self) -> None:
        self._finalizer()


class _ReferenceError(InfrastructureError):
    """An exception inside the reference."""


def _game_file(source: Source, folder: Path) -> Path:
    """The game file on disk, written to `folder` if only its content is given."""
    if isinstance(source, Mapping):
        for name in (GAME_FILE, TRAJECTORY_FILE):
            if name not in source:
                raise UsageError(f"the contents of a game need {name!r} among their keys")
            (folder / name).write_bytes(source[name])
        return folder / GAME_FILE
    path = Path(source)
    file = path / GAME_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(file, "there is no such game file", "Give the folder that holds game.tw-pddl.")
    return file.absolute()


def _end(process: subprocess.Popen[bytes], log: Any, folder: str) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    shutil.rmtree(folder, ignore_errors=True)
