"""The conformance checker: a healthy environment passes, and each planted fault is found by the checks it concerns."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from agentgym.checker import CHECKS, ContractError, check_agent_env, check_env_id
from agentgym.env import AgentEnv, Info, Outcome
from agentgym.errors import InfrastructureError, StepOrderError, UsageError
from agentgym.task import Task
from tests.worlds import CountEnv

Result = tuple[Any, float, bool, bool, Info]


class BoardEnv(CountEnv):
    """Two independent switches, shown at every turn: its state key has something to get wrong."""

    family: ClassVar[str] = "board"

    def _start(self, task: Task) -> Outcome:
        self.on: list[str] = []
        return Outcome("nothing is on", score=0.0)

    def _act(self, action: str) -> Outcome:
        if action not in ("a", "b", "c"):
            return Outcome("The switches are a, b and c.", valid=False)
        if action in self.on:
            self.on.remove(action)
        else:
            self.on.append(action)
        return Outcome(f"on: {' '.join(sorted(self.on))}", score=len(self.on) / 3, done=len(self.on) == 3)

    def _save(self) -> bytes:
        return msgspec.json.encode(self.on)

    def _load(self, task: Task, payload: bytes) -> None:
        self.on = msgspec.json.decode(payload, type=list[str])

    def _admissible(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def _state_key(self) -> str:
        return f"on: {' '.join(sorted(self.on))}"

    def _checkpoints(self) -> tuple[str, ...]:
        return tuple(sorted(self.on))

    def expert(self) -> str | None:
        return next((switch for switch in "abc" if switch not in self.on), None)


class PythonGlobal(CountEnv):
    def _act(self, action: str) -> Outcome:
        outcome = super()._act(action)
        return outcome._replace(observation=f"{outcome.observation} {random.random()}")


class NumpyGlobal(CountEnv):
    def _start(self, task: Task) -> Outcome:
        return super()._start(task)._replace(observation=f"a die shows {np.random.randint(10**6)}")


class ReseedsGlobal(CountEnv):
    def _start(self, task: Task) -> Outcome:
        random.seed(0)
        return super()._start(task)


class ClockInInfo(CountEnv):
    def _act(self, action: str) -> Outcome:
        return super()._act(action)._replace(extra={"when": time.perf_counter()})


class HashOrder(CountEnv):
    def _act(self, action: str) -> Outcome:
        things = " ".join({"apple", "pear", "plum", "fig", "kiwi", "lime"})
        return super()._act(action)._replace(observation=f"You see {things}.")


class ClassState(CountEnv):
    played: ClassVar[list[str]] = []

    def _start(self, task: Task) -> Outcome:
        self.played.clear()
        return super()._start(task)

    def _act(self, action: str) -> Outcome:
        self.played.append(action)
        return super()._act(action)._replace(feedback="", extra={"played": len(self.played)})

    def _load(self, task: Task, payload: bytes) -> None:
        super()._load(task, payload)


class KeepsState(CountEnv):
    episodes = 0

    def _start(self, task: Task) -> Outcome:
        self.episodes += 1
        return super()._start(task)._replace(observation=f"episode {self.episodes}")


class RewardAfterFault(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        try:
            return super().step(action)
        except InfrastructureError:
            self._over = False
            raise


class SwallowsFault(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        try:
            return super().step(action)
        except InfrastructureError:
            assert self._info is not None
            return "Something went wrong.", 0.0, True, False, self._info


class _Terminal(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            observation, info = self._spoil(observation, info)
        return observation, reward, terminated, truncated, info

    def _spoil(self, observation: str, info: Info) -> tuple[str, Any]:
        return observation, info


class NoLastObservation(_Terminal):
    def _spoil(self, observation: str, info: Info) -> tuple[str, Any]:
        return "", info


class NoLastInfo(_Terminal):
    def _spoil(self, observation: str, info: Info) -> tuple[str, Any]:
        return observation, {"task_id": info["task_id"]}


class NoVerdict(_Terminal):
    def _spoil(self, observation: str, info: Info) -> tuple[str, Any]:
        return observation, {**info, "success": -1}


class NextInfo(_Terminal):
    def _spoil(self, observation: str, info: Info) -> tuple[str, Any]:
        return observation, {**info, "turn": 0}


class LateTruncation(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        limit, self.max_turns = self.max_turns, self.max_turns + 1
        try:
            return super().step(action)
        finally:
            self.max_turns = limit


_live: dict[bytes, Any] = {}


class LiveSnapshot(CountEnv):
    def _save(self) -> bytes:
        key = super()._save()
        _live[key] = self.state
        return key

    def _load(self, task: Task, payload: bytes) -> None:
        super()._load(task, payload)
        self.state = _live[payload]


class ForgetfulSnapshot(BoardEnv):
    def _load(self, task: Task, payload: bytes) -> None:
        super()._load(task, payload)
        self.on = self.on[:1]


class CountedSnapshot(CountEnv):
    saves = 0

    def _save(self) -> bytes:
        self.saves += 1
        return msgspec.msgpack.encode([self.state, self.saves])

    def _load(self, task: Task, payload: bytes) -> None:
        self.state, self.saves = msgspec.msgpack.decode(payload, type=tuple[type(self.state), int])  # type: ignore[misc]


_parked: dict[bytes, bytes] = {}


class ParkedSnapshot(CountEnv):
    """Keeps its state in the module, and only a name of it in the snapshot."""

    def _save(self) -> bytes:
        data = super()._save()
        name = hashlib.sha256(data).digest()
        _parked[name] = data
        return name

    def _load(self, task: Task, payload: bytes) -> None:
        super()._load(task, _parked[payload])


class Careless(CountEnv):
    def _load(self, task: Task, payload: bytes) -> None:
        try:
            super()._load(task, payload)
        except msgspec.DecodeError:
            raise RuntimeError("bad payload") from None


class Raises(CountEnv):
    def _act(self, action: str) -> Outcome:
        if not action.strip():
            raise IndexError("string index out of range")
        return super()._act(action)


class TurnNotCounted(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        observation, reward, terminated, truncated, info = super().step(action)
        if not info["valid"] and not truncated:
            self._turn -= 1
            info["turn"] -= 1
        return observation, reward, terminated, truncated, info


class TooLong(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        _, reward, terminated, truncated, info = super().step(action)
        return "x" * (self.max_observation + 1 - (terminated or truncated)), reward, terminated, truncated, info


class Surrogate(CountEnv):
    def _start(self, task: Task) -> Outcome:
        return super()._start(task)._replace(observation="broken \ud83d smile")


class Bytes(CountEnv):
    def _start(self, task: Task) -> Outcome:
        return super()._start(task)._replace(observation=b"bytes")  # type: ignore[arg-type]


class BadReward(CountEnv):
    def _act(self, action: str) -> Outcome:
        return super()._act(action)._replace(reward=float("inf"))


class BadScore(CountEnv):
    def _act(self, action: str) -> Outcome:
        return super()._act(action)._replace(score=1.5)


class OddInfo(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        *rest, info = super().step(action)
        return (*rest, {**info, "success": None, "surprise": 1})  # type: ignore[return-value]


class SharedInfo(CountEnv):
    def _start(self, task: Task) -> Outcome:
        self.shared: dict[str, Any] = {"board": []}
        return super()._start(task)._replace(extra=self.shared)

    def _act(self, action: str) -> Outcome:
        return super()._act(action)._replace(extra=self.shared)

    def _load(self, task: Task, payload: bytes) -> None:
        super()._load(task, payload)
        self.shared = {"board": []}


class PlaysOn(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        try:
            return super().step(action)
        except StepOrderError:
            if self._info is None or self._broken:
                raise
            return self._observation, 0.0, True, False, self._info


class WrongError(CountEnv):
    def step(self, action: str) -> Result:  # type: ignore[override]
        if self.task is None:
            raise AttributeError("no state yet")
        return super().step(action)


class PathKey(BoardEnv):
    def _state_key(self) -> str:
        return f"on: {' '.join(self.on)}"


class CoarseKey(BoardEnv):
    def _state_key(self) -> str:
        return str(len(self.on))


class BadExpert(CountEnv):
    def expert(self) -> str | None:
        return "upp"


class LyingAdmissible(CountEnv):
    def _admissible(self) -> tuple[str, ...]:
        return ("down", "up", "fly")


class Undeclared(CountEnv):
    capabilities: ClassVar[frozenset[str]] = frozenset({"snapshot", "admissible", "expert", "checkpoints"})


class Overdeclared(CountEnv):
    capabilities: ClassVar[frozenset[str]] = CountEnv.capabilities | {"process_score", "tools", "telepathy"}


class FirstTask(CountEnv):
    def _start(self, task: Task) -> Outcome:
        self.task = self.task_set.at(self.split, 0)
        return super()._start(task)


class AnyOption(CountEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:  # type: ignore[override]
        known = {key: value for key, value in (options or {}).items() if key in ("task", "split")}
        return super().reset(seed=seed, options=known)


PLANTED: list[tuple[type[AgentEnv], set[str]]] = [
    (PythonGlobal, {"global_random"}),
    (NumpyGlobal, {"global_random"}),
    (ReseedsGlobal, {"global_random"}),
    (ClockInInfo, {"determinism"}),
    (ClassState, {"interleaving"}),
    (KeepsState, {"fresh_reset"}),
    (RewardAfterFault, {"faults"}),
    (SwallowsFault, {"faults"}),
    (NoLastObservation, {"ends"}),
    (NoLastInfo, {"ends"}),
    (NoVerdict, {"ends"}),
    (NextInfo, {"ends"}),
    (LateTruncation, {"ends"}),
    (LiveSnapshot, {"snapshot_continuation", "snapshot_isolation"}),
    (ForgetfulSnapshot, {"snapshot_continuation", "snapshot_bytes"}),
    (CountedSnapshot, {"snapshot_bytes"}),
    (Careless, {"snapshot_damage"}),
    (Raises, {"bad_actions"}),
    (TurnNotCounted, {"bad_actions", "ends"}),
    (TooLong, {"observations"}),
    (Surrogate, {"observations"}),
    (Bytes, {"observations"}),
    (BadReward, {"rewards"}),
    (BadScore, {"infos"}),
    (OddInfo, {"infos"}),
    (SharedInfo, {"shared_infos"}),
    (PlaysOn, {"order"}),
    (WrongError, {"order"}),
    (PathKey, {"state_key_order"}),
    (CoarseKey, {"state_key_future"}),
    (BadExpert, {"expert"}),
    (LyingAdmissible, {"admissible"}),
    (Undeclared, {"capabilities"}),
    (Overdeclared, {"capabilities"}),
    (FirstTask, {"reset_options"}),
    (AnyOption, {"reset_options"}),
]


@pytest.mark.parametrize("make", [CountEnv, BoardEnv])
def test_a_healthy_environment_passes_every_check(make: type[AgentEnv]) -> None:
    report = check_agent_env(make)
    assert report.findings == []
    assert {name for name, _ in report.passed} == {each.name for each in CHECKS if not each.elsewhere}
    assert [name for name, _ in report.skipped] == ["other_process", "snapshot_elsewhere"]


@pytest.mark.parametrize(("make", "expected"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found_by_the_checks_it_concerns(make: type[AgentEnv], expected: set[str]) -> None:
    report = check_agent_env(make, raise_on_failure=False)
    assert {each.check for each in report.findings} == expected, report.findings
    assert all(each.message and each.mend for each in report.findings)


def test_every_check_but_gymnasiums_has_a_planted_fault() -> None:
    found = set().union(*(expected for _, expected in PLANTED)) | {"other_process", "snapshot_elsewhere"}
    assert {each.name for each in CHECKS} - found == {"gymnasium_check"}


def test_an_order_of_a_set_that_shows_is_found_by_another_process() -> None:
    report = check_agent_env(HashOrder, subprocess=True, raise_on_failure=False)
    assert {each.check for each in report.findings} == {"other_process"}


def test_a_snapshot_that_leaves_state_behind_is_found_by_another_process() -> None:
    assert check_agent_env(ParkedSnapshot).findings == []
    report = check_agent_env(ParkedSnapshot, subprocess=True, raise_on_failure=False)
    assert {each.check for each in report.findings} == {"snapshot_elsewhere"}
    assert "no usable state of count-v0" in report.findings[0].message


def test_a_lambda_cannot_go_to_another_process_and_the_report_says_so() -> None:
    report = check_agent_env(lambda: CountEnv(), subprocess=True, raise_on_failure=False)
    assert [each.check for each in report.findings] == ["other_process"]
    assert "pickle" in report.findings[0].message


def test_all_findings_are_in_the_message_of_the_error() -> None:
    with pytest.raises(ContractError, match="breaks the contract") as caught:
        check_agent_env(LiveSnapshot)
    for each in caught.value.report.findings:
        assert each.message in str(caught.value)
        assert each.mend in str(caught.value)
    assert len(caught.value.report.findings) == 2


def test_checks_that_build_on_a_failed_one_are_skipped_and_say_so() -> None:
    report = check_agent_env(ClockInInfo, raise_on_failure=False)
    assert dict(report.skipped)["global_random"] == "it builds on determinism"
    assert "expert" in {name for name, _ in report.passed}


def test_the_checker_leaves_the_global_generators_as_they_were() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    check_agent_env(CountEnv)
    assert (random.random(), np.random.random()) == expected


def test_a_registered_id_is_checked_with_other_processes() -> None:
    report = check_env_id("count", max_turns=6)
    assert report.env == "test/Count-v0"
    assert report.findings == []
    assert {"other_process", "snapshot_elsewhere"} <= {name for name, _ in report.passed}
    assert check_agent_env("test/Count-v0").env == "test/Count-v0"


def test_a_wrong_call_of_the_checker_is_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean"):
        check_env_id("test/Coun-v0")
    with pytest.raises(UsageError, match="option of"):
        check_env_id("test/Count-v0", delayy=1)
    with pytest.raises(UsageError, match="turns"):
        check_agent_env(CountEnv, turns=0)
    with pytest.raises(UsageError, match="no AgentEnv"):
        check_agent_env(lambda: object())  # type: ignore[arg-type, return-value]
