"""The Ray back end: each worker is an actor, so environments spread over a cluster."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from agentgym.errors import require_extra
from agentgym.host import Command, EnvHost, Fault
from agentgym.workers import Event, TimeLimits

_POLL_SECONDS = 0.05


class _Actor:
    """Runs inside Ray."""

    def __init__(self) -> None:
        self._host = EnvHost()

    def call(self, slot: int, command: Command) -> Event:
        return Event(slot, self._host.call(slot, command))


class RayBackend:
    """Ray actors with one or several slots each. Uses the running cluster, or starts a local one.

    Args:
        workers: number of actors, one CPU each.
        envs_per_worker: slots an actor.
        limits: time limits; the time an actor needs to start counts as part of the first reset.
    """

    def __init__(self, workers: int, envs_per_worker: int, limits: TimeLimits) -> None:
        self._ray: Any = require_extra("ray", extra="ray")
        self._owns_cluster = not self._ray.is_initialized()
        if self._owns_cluster:
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.slots = workers * envs_per_worker
        self._per_worker = envs_per_worker
        self._limits = limits
        self._class = self._ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._actors = [self._class.remote() for _ in range(workers)]
        self._running: dict[Any, tuple[int, Command, float]] = {}
        self._occupied: set[int] = set()
        self._answered: dict[int, float] = {}  # when each actor answered last
        self._woken = False

    def send(self, slot: int, command: Command) -> None:
        """Calls the slot's actor."""
        reference = self._actors[slot // self._per_worker].call.remote(slot, command)
        self._running[reference] = (slot, command, time.monotonic())
        self._occupied.add(slot)

    def receive(self, timeout: float | None = None) -> list[Event]:
        """Waits for answers, dead actors and expired time limits."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            events: list[Event] = []
            if self._running:
                ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
                if ready:
                    ready, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
                for reference in ready:
                    if reference in self._running:
                        events += self._take(reference)
            elif not self._woken:
                time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            oldest: dict[int, tuple[int, Command, float]] = {}
            for item in self._running.values():  # an actor works on its oldest call; the others wait behind it
                oldest.setdefault(item[0] // self._per_worker, item)
            for index, (slot, command, since) in oldest.items():
                if now - max(since, self._answered.get(index, 0.0)) >= self._limits.of(command):
                    events += self._replace(slot, self._limits.fault(command))
                    break
            if events or self._woken or (deadline is not None and now >= deadline):
                self._woken = False
                return events

    def _take(self, reference: Any) -> list[Event]:
        slot, _, _ = self._running.pop(reference)
        self._answered[slot // self._per_worker] = time.monotonic()
        try:
            event = Event(*self._ray.get(reference))
        except self._ray.exceptions.RayActorError as error:
            return self._replace(slot, Fault("killed", f"the Ray actor died: {str(error).splitlines()[0]}"))
        except self._ray.exceptions.RayError as error:
            return [Event(slot, Fault("exception", str(error)[:500]))]
        if isinstance(event.answer, Fault):
            self._occupied.discard(slot)
        return [event]

    def _replace(self, culprit: int, fault: Fault) -> list[Event]:
        index = culprit // self._per_worker
        self._exchange(index)
        slots = sorted({slot for slot in self._occupied if slot // self._per_worker == index} | {culprit})
        self._occupied -= set(slots)
        lost = Fault("lost", "another episode brought down the Ray actor they shared")
        return [Event(slot, fault if slot == culprit else lost) for slot in slots]

    def _exchange(self, index: int) -> None:
        self._ray.kill(self._actors[index])
        self._actors[index] = self._class.remote()
        self._running = {ref: item for ref, item in self._running.items() if item[0] // self._per_worker != index}

    def wake(self) -> None:
        """Makes a waiting `receive` return at its next poll."""
        self._woken = True

    def cancel(self) -> None:
        """Replaces the actors at work."""
        for index in sorted({slot // self._per_worker for slot, _, _ in self._running.values()}):
            self._exchange(index)
        self._occupied.clear()

    def close(self) -> None:
        """Ends the actors, and the cluster if it was started here."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._owns_cluster:
            self._ray.shutdown()
