"""Where environments live during a rollout: in this thread, in threads, in processes, or in Ray actors.

All back ends have the same three calls: `send` a command to a slot, `receive` answers, `close`. A slot holds one
episode. Whatever goes wrong in a slot arrives as a `Fault`; the worker behind it is replaced and the others go on.

| back end | exceptions, garbage | hangs | crashes, SIGKILL |
|---|---|---|---|
| serial | fault | waits for ever | takes the runner with it |
| threads | fault | fault; the thread is abandoned | takes the runner with it |
| processes | fault | fault; the process is killed | fault |
| ray | fault | fault; the actor is killed | fault |
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import selectors
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, Protocol

from agentgym.errors import UsageError, choices
from agentgym.host import Answer, Command, EnvHost, Fault, Start

BACKENDS = ("serial", "threads", "processes", "ray")
BackendName = Literal["serial", "threads", "processes", "ray"]


class Event(NamedTuple):
    """An answer from a slot."""

    slot: int
    answer: Answer


class TimeLimits(NamedTuple):
    """Seconds that a reset and a step may take."""

    reset: float = 120.0
    step: float = 60.0

    def of(self, command: Command) -> float:
        """The limit of a command; bringing an episode back may take a step's time for each of its turns."""
        if isinstance(command, Start):
            return self.reset + self.step * len(command.completions)
        return self.step

    def fault(self, command: Command) -> Fault:
        """The fault of a command that took too long."""
        name = "reset" if isinstance(command, Start) else "step"
        return Fault(
            f"{name} timeout",
            f"{name} took longer than {self.of(command):g} s (raise --{name}-timeout if that is normal)",
        )


class Backend(Protocol):
    """Slots that carry out commands."""

    slots: int

    def send(self, slot: int, command: Command) -> None:
        """Gives a command to a slot that owes no answer."""

    def receive(self, timeout: float | None = None) -> list[Event]:
        """Waits for answers; an empty list after `timeout` seconds or a `wake`."""

    def wake(self) -> None:
        """Makes a waiting `receive` return; may be called from any thread."""

    def cancel(self) -> None:
        """Gives up all answers that are owed, so that no later rollout receives them; workers at work are replaced."""

    def close(self) -> None:
        """Ends all workers."""


def make_backend(name: str, workers: int = 1, *, envs_per_worker: int = 1, limits: TimeLimits | None = None) -> Backend:
    """A back end by name.

    Args:
        name: "serial", "threads", "processes" or "ray".
        workers: number of threads, processes or actors.
        envs_per_worker: episodes that share one worker; when it dies, the others are brought back by re-stepping.
        limits: time limits.

    Raises:
        UsageError: for an unknown name or a number below 1.
    """
    if workers < 1 or envs_per_worker < 1:
        raise UsageError(f"workers and envs_per_worker must be at least 1, not {workers} and {envs_per_worker}")
    limits = limits or TimeLimits()
    if name == "serial":
        return SerialBackend(workers * envs_per_worker)
    if name == "threads":
        return ThreadBackend(workers * envs_per_worker, limits)
    if name == "processes":
        return ProcessBackend(workers, envs_per_worker, limits)
    if name == "ray":
        from agentgym.integrations.ray_workers import RayBackend

        return RayBackend(workers, envs_per_worker, limits)
    raise choices("back end", name, BACKENDS)


class SerialBackend:
    """Everything in the caller's thread: for debugging and for the cheapest environments."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._host = EnvHost()
        self._pending: list[tuple[int, Command]] = []
        self._woken = threading.Event()

    def send(self, slot: int, command: Command) -> None:
        """Queues a command; `receive` carries it out."""
        self._pending.append((slot, command))

    def receive(self, timeout: float | None = None) -> list[Event]:
        """Carries out what was sent."""
        if not self._pending:
            self._woken.wait(timeout)
            self._woken.clear()
            return []
        pending, self._pending = self._pending, []
        call = self._host.call
        return [Event(slot, call(slot, command)) for slot, command in pending]

    def wake(self) -> None:
        """Makes a waiting `receive` return."""
        self._woken.set()

    def cancel(self) -> None:
        """Forgets what was sent."""
        self._pending.clear()

    def close(self) -> None:
        """Closes the environments."""
        self._host.close()


class _Thread:
    """One daemon thread with a host of its own."""

    def __init__(self, slot: int, answers: queue.SimpleQueue[tuple[object, Event] | None]) -> None:
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.running: tuple[Command, float] | None = None
        self._slot = slot
        self._answers = answers
        threading.Thread(target=self._serve, name=f"agentgym-{slot}", daemon=True).start()

    def _serve(self) -> None:
        host = EnvHost()
        while (command := self.commands.get()) is not None:
            self._answers.put((self, Event(self._slot, host.call(self._slot, command))))
        host.close()


class ThreadBackend:
    """A thread a slot: for environments that wait (servers, containers) and release the interpreter."""

    def __init__(self, slots: int, limits: TimeLimits) -> None:
        self.slots = slots
        self._limits = limits
        self._answers: queue.SimpleQueue[tuple[object, Event] | None] = queue.SimpleQueue()
        self._threads = [_Thread(slot, self._answers) for slot in range(slots)]

    def send(self, slot: int, command: Command) -> None:
        """Hands the command to the slot's thread."""
        thread = self._threads[slot]
        thread.running = (command, time.monotonic())
        thread.commands.put(command)

    def receive(self, timeout: float | None = None) -> list[Event]:
        """Waits for answers and for hanging threads."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self._answers.empty():
                return self._collect(self._answers.get())
            events = self._expired()
            if events:
                return events
            now = time.monotonic()
            limits = [t.running[1] + self._limits.of(t.running[0]) - now for t in self._threads if t.running]
            if deadline is not None:
                limits.append(deadline - now)
            try:
                item = self._answers.get(timeout=max(0.0, min(limits)) if limits else None)
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    return self._expired()
                continue
            return self._collect(item)

    def _collect(self, item: tuple[object, Event] | None) -> list[Event]:
        events = []
        while True:
            if item is not None and item[0] is self._threads[item[1].slot]:
                self._threads[item[1].slot].running = None
                events.append(item[1])
            try:
                item = self._answers.get_nowait()
            except queue.Empty:
                return events

    def _expired(self) -> list[Event]:
        events = []
        now = time.monotonic()
        for slot, thread in enumerate(self._threads):
            if thread.running and now - thread.running[1] >= self._limits.of(thread.running[0]):
                events.append(Event(slot, self._limits.fault(thread.running[0])))
                self._abandon(slot)
        return events

    def _abandon(self, slot: int) -> None:
        self._threads[slot].commands.put(None)  # it ends if it ever comes back
        self._threads[slot] = _Thread(slot, self._answers)

    def wake(self) -> None:
        """Makes a waiting `receive` return."""
        self._answers.put(None)

    def cancel(self) -> None:
        """Leaves threads at work behind; their answers are recognised as stale."""
        for slot, thread in enumerate(self._threads):
            if thread.running:
                self._abandon(slot)

    def close(self) -> None:
        """Lets the threads end; a hanging one is a daemon and dies with the process."""
        for thread in self._threads:
            thread.commands.put(None)


_FLUSH_SECONDS = 0.02
_CLOSE_SECONDS = 2.0


def _serve(connection: Connection, life: Connection, current: Any) -> None:
    """Main of a worker process: answers batches of commands until the runner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the runner decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_runner, args=(life,), daemon=True).start()
    host = EnvHost()
    answers: list[Event] = []
    try:
        while True:
            batch: list[tuple[int, Command]] = pickle.loads(connection.recv_bytes())
            if not batch:  # the runner has finished
                host.close()
                return
            flushed = time.monotonic()
            for slot, command in batch:
                current.value = slot  # so that the runner knows whose fault a crash is
                answers.append(Event(slot, host.call(slot, command)))
                if time.monotonic() - flushed > _FLUSH_SECONDS:
                    connection.send_bytes(_dump(answers))
                    answers.clear()
                    flushed = time.monotonic()
            current.value = -1
            if answers:
                connection.send_bytes(_dump(answers))
                answers.clear()
    except (EOFError, OSError, KeyboardInterrupt):
        host.close()


def _die_with_runner(life: Connection) -> None:
    """Ends the process, hanging environment or not, as soon as the runner's end of the pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        life.recv_bytes()
    os._exit(1)


def _dump(events: list[Event]) -> bytes:
    try:
        return pickle.dumps(events, protocol=5)
    except Exception:
        return pickle.dumps([_picklable(event) for event in events], protocol=5)


def _picklable(event: Event) -> Event:
    try:
        pickle.dumps(event, protocol=5)
    except Exception as error:
        return Event(
            event.slot,
            Fault("garbage", f"info holds something that cannot be sent between processes: {error}"),
        )
    return event


class _Process:
    """One worker process and what the runner knows about it."""

    def __init__(self, context: multiprocessing.context.BaseContext, index: int) -> None:
        self.index = index
        self.current = context.RawValue("i", -1)
        self.connection, theirs = context.Pipe()
        life, self._life = context.Pipe(duplex=False)
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, life, self.current), name=f"agentgym-worker-{index}", daemon=True
        )
        with _hidden_main():
            self.process.start()
        theirs.close()
        life.close()
        self.queued: list[tuple[int, Command]] = []
        self.outstanding: deque[tuple[int, Command]] = deque()
        self.occupied: set[int] = set()
        self.since = 0.0

    def at_work(self) -> Command:
        """The command being carried out, of those that are owed an answer."""
        return dict(self.outstanding).get(self.current.value, self.outstanding[0][1])

    def flush(self) -> None:
        """Sends what is queued, once the last batch is answered: so neither side ever waits on a full pipe."""
        if self.queued and not self.outstanding:
            self.outstanding.extend(self.queued)
            self.since = time.monotonic()
            data = pickle.dumps(self.queued, protocol=5)
            self.queued = []
            with contextlib.suppress(OSError):  # a dead worker is noticed by its sentinel
                self.connection.send_bytes(data)

    def close(self) -> None:
        """Kills it and frees its pipes; twice is fine."""
        if self._life.closed:
            return
        self._life.close()
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process.close()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keeps multiprocessing from importing the user's script again: workers need nothing from it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class ProcessBackend:
    """Processes with one or several slots each: whatever an environment does, only its own episode suffers."""

    def __init__(self, workers: int, envs_per_worker: int, limits: TimeLimits) -> None:
        self.slots = workers * envs_per_worker
        self._per_worker = envs_per_worker
        self._limits = limits
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["agentgym.workers"])
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self.workers: list[_Process] = []
        try:
            for index in range(workers):
                self.workers.append(self._begin(index))
        except BaseException:
            self.close()
            raise

    def _begin(self, index: int) -> _Process:
        worker = _Process(self._context, index)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._selector.register(worker.process.sentinel, selectors.EVENT_READ, worker)
        return worker

    def send(self, slot: int, command: Command) -> None:
        """Queues a command for the slot's process."""
        worker = self.workers[slot // self._per_worker]
        worker.queued.append((slot, command))
        worker.occupied.add(slot)

    def receive(self, timeout: float | None = None) -> list[Event]:
        """Waits for answers, dead processes and expired time limits."""
        for worker in self.workers:
            worker.flush()
        now = time.monotonic()
        waits = [w.since + self._limits.of(w.at_work()) - now for w in self.workers if w.outstanding]
        if timeout is not None:
            waits.append(timeout)
        events: list[Event] = []
        dead: list[_Process] = []
        for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
            worker = key.data
            if worker is None:
                os.read(self._wake_read, 65536)
            elif key.fileobj is worker.connection:
                if not self._read(worker, events) and worker not in dead:
                    dead.append(worker)
            elif worker not in dead:  # its sentinel: it has ended, but its last words may still lie in the pipe
                with contextlib.suppress(OSError):
                    while worker.connection.poll() and self._read(worker, events):
                        pass
                dead.append(worker)
        for worker in dead:
            code = self._exit_code(worker)
            events += self._replace(worker, Fault("killed", f"the worker process died ({code})"))
        now = time.monotonic()
        for worker in self.workers:
            if worker.outstanding and now - worker.since >= self._limits.of(worker.at_work()):
                events += self._replace(worker, None)
        return events

    def _read(self, worker: _Process, events: list[Event]) -> bool:
        """Takes one message of a worker; False when it is gone."""
        try:
            answered: list[Event] = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return False
        worker.since = time.monotonic()
        for event in answered:
            worker.outstanding.popleft()
            if isinstance(event.answer, Fault):
                worker.occupied.discard(event.slot)
            events.append(event)
        return True

    @staticmethod
    def _exit_code(worker: _Process) -> str:
        worker.process.join(1.0)
        code = worker.process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _replace(self, worker: _Process, fault: Fault | None) -> list[Event]:
        """A fresh process for a dead or hanging one; the slot at work is at fault, its neighbours are only lost."""
        outstanding = dict(worker.outstanding)
        culprit = worker.current.value
        if culprit not in outstanding:
            culprit = next(iter(outstanding), None)
        if culprit is None:
            culprit = min(worker.occupied, default=None)
        if fault is None:
            fault = self._limits.fault(outstanding[culprit])
        lost = Fault("lost", "another episode brought down the worker process they shared")
        owed = worker.occupied | {slot for slot, _ in worker.queued}
        events = [Event(slot, fault if slot == culprit else lost) for slot in sorted(owed)]
        self._exchange(worker)
        return events

    def _exchange(self, worker: _Process) -> None:
        self._selector.unregister(worker.connection)
        self._selector.unregister(worker.process.sentinel)
        worker.close()
        self.workers[worker.index] = self._begin(worker.index)

    def wake(self) -> None:
        """Makes a waiting `receive` return."""
        with self._wake_lock:  # a late policy may call this after close, when the number may belong to another file
            if self._wake_write >= 0:
                with contextlib.suppress(BlockingIOError, OSError):
                    os.write(self._wake_write, b"w")

    def cancel(self) -> None:
        """Replaces the processes at work."""
        for worker in list(self.workers):
            worker.queued.clear()
            if worker.outstanding:
                self._exchange(worker)
            worker.occupied.clear()

    def close(self) -> None:
        """Lets idle processes close their environments, and kills the others: nobody waits for what they hold."""
        for worker in self.workers:
            if not worker.outstanding:
                with contextlib.suppress(OSError, ValueError):
                    worker.connection.send_bytes(pickle.dumps([]))
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self.workers:
            if not worker.outstanding:
                with contextlib.suppress(ValueError):
                    worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.close()
        self.workers = []
        self._selector.close()
        with self._wake_lock:
            for descriptor in (self._wake_read, self._wake_write):
                if descriptor >= 0:
                    os.close(descriptor)
            self._wake_read = self._wake_write = -1
