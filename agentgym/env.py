"""The environment contract in one file: `AgentEnv` and the `Info` that every family returns.

A family implements four hooks (`_start`, `_act`, and, where it declares the capability, `_save` and `_load`);
everything that all families share lives here: the order of calls, task selection, turn counting, action formats,
cutting of observations, rewards as increments of the score, and the snapshot envelope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

import gymnasium
import msgspec

from agentgym.actions import ActionFormat, Parsed, ToolSpec, get_format
from agentgym.errors import AgentGymError, StepOrderError, UsageError, choices
from agentgym.registry import known_options, make_task_set
from agentgym.spaces import Unicode, find_surrogate
from agentgym.task import Task, TaskSet, default_split, resolve_split, select_task

CAPABILITIES: frozenset[str] = frozenset(
    {
        "snapshot",
        "admissible",
        "state_key",
        "feedback",
        "checkpoints",
        "process_score",
        "gold_answer",
        "expert",
        "tools",
        "phases",
    }
)
MAX_ACTION = 32_768
SNAPSHOT_VERSION = 1


class Info(TypedDict):
    """The same keys at every reset and step of every family; no clock times, so equal seeds give equal infos.

    Keys:
        task_id, kind, split: the task being played.
        turn: number of actions taken so far.
        role: who acts next.
        valid: did the last action parse and apply (True at reset).
        success: -1 unknown, 0 failed, 1 solved (vector environments turn None into False).
        score: in [0, 1], or NaN while unknown.
        admissible: the actions that would be valid now, or None where a family cannot list them.
        state_key: digest of the true state, or "": equal keys have the same continuation, turn count and random
            draws apart.
        feedback: textual feedback of the environment beyond the observation, or "".
        checkpoints: names of the intermediate goals reached so far.
        usage: tokens or calls spent inside the environment (judge, opponent), by name.
        extra: family-specific values; with an action format other than the text itself also "action" (as parsed) and
            "valid_format".
    """

    task_id: str
    kind: str
    split: str
    turn: int
    role: str
    valid: bool
    success: int
    score: float
    admissible: tuple[str, ...] | None
    state_key: str
    feedback: str
    checkpoints: tuple[str, ...]
    usage: dict[str, float]
    extra: dict[str, Any]


INFO_KEYS: tuple[str, ...] = tuple(Info.__annotations__)


class Outcome(NamedTuple):
    """What a family's hook says of one action.

    Attributes:
        observation: text the agent sees (cut to the family's limit afterwards).
        valid: did the action apply.
        score: progress in [0, 1] after the action, or None to keep the last one.
        success: -1, 0 or 1; on the last turn -1 is resolved to `score >= 1`.
        done: the episode has ended by the rules of the task.
        reward: None for the increment of the score.
        feedback: textual feedback beyond the observation.
        extra: family-specific values for `info["extra"]`.
    """

    observation: str
    valid: bool = True
    score: float | None = None
    success: int = -1
    done: bool = False
    reward: float | None = None
    feedback: str = ""
    extra: dict[str, Any] | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope of an environment's state. Its bytes are MessagePack, never pickle.

    Attributes:
        version: `SNAPSHOT_VERSION`.
        environment: family and version of the class that wrote it.
        scope: "full", or "files" where processes are not part of it.
        task_id, task_set, split: what is being played.
        turn, score, over: progress of the episode.
        rng: state of the environment's generator.
        observation, info: what the agent saw last.
        payload: the family's own state.
    """

    version: int
    environment: str
    scope: str
    task_id: str
    task_set: str
    split: str
    turn: int
    score: float | None
    over: bool
    rng: dict[str, Any]
    observation: str
    info: Info
    payload: bytes


class AgentEnv(gymnasium.Env[str, str]):
    """Base class of all environments: text in, text out.

    Args:
        tasks: name of a task set, a `TaskSet`, or a path in the benchmark's published format; None for the family's
            generated set.
        split: the benchmark's own split name, or train / validation / test; None for train, or the first one of a set
            without it.
        max_turns: number of actions after which the episode is truncated; None for the family's default.
        max_observation: greatest length of an observation in characters; longer ones keep head and tail.
        action_format: how the text given to `step` is read; see `agentgym.actions`.
        render_mode: "ansi" or None.

    Raises:
        UsageError: for an unknown task set, split, option or format.
    """

    family: ClassVar[str] = ""
    version: ClassVar[int] = 0
    capabilities: ClassVar[frozenset[str]] = frozenset()
    replay: ClassVar[Literal["exact", "outcome", "none"]] = "exact"
    snapshot_scope: ClassVar[Literal["full", "files"]] = "full"
    default_tasks: ClassVar[str] = ""
    default_max_turns: ClassVar[int] = 50
    default_max_observation: ClassVar[int] = 16_384
    prompt_templates: ClassVar[Mapping[str, str]] = {}
    tools: tuple[ToolSpec, ...] = ()
    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as gymnasium.Env declares it

    def __init__(
        self,
        *,
        tasks: str | Path | TaskSet | None = None,
        split: str | None = None,
        max_turns: int | None = None,
        max_observation: int | None = None,
        action_format: str | ActionFormat = "raw",
        render_mode: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise choices(f"option of {self.family}", sorted(unknown)[0], known_options(type(self)))
        self.task_set = self._resolve_tasks(self.default_tasks if tasks is None else tasks)
        self.split = default_split(self.task_set) if split is None else resolve_split(self.task_set, split)
        self.max_turns = _positive("max_turns", self.default_max_turns if max_turns is None else max_turns)
        limit = self.default_max_observation if max_observation is None else max_observation
        self.max_observation = _positive("max_observation", limit)
        self.action_format = get_format(action_format)
        if render_mode not in (None, "ansi"):
            raise choices("render_mode", render_mode, ["ansi"])
        self.render_mode = render_mode
        self.observation_space = Unicode(self.max_observation)
        self.action_space = Unicode(MAX_ACTION)
        self.task: Task | None = None
        self._turn = 0
        self._score: float | None = None
        self._over = True
        self._broken = False
        self._observation = ""
        self._info: Info | None = None

    # What a family implements.

    def _start(self, task: Task) -> Outcome:
        """Sets up a task and returns the first observation (its `valid` and `reward` are not used)."""
        raise TypeError(f"{type(self).__name__} does not implement _start(task)")

    def _act(self, action: str) -> Outcome:
        """Applies one parsed action."""
        raise TypeError(f"{type(self).__name__} does not implement _act(action)")

    def _call_tool(self, tool: str, arguments: dict[str, Any]) -> Outcome:
        """Applies one tool call; families with tools override it."""
        return Outcome(f"There is no tool {tool!r} here.", valid=False)

    def _save(self) -> bytes:
        """The family's own state, for `snapshot`."""
        raise UsageError(f"{self.family} cannot be saved: it does not declare the capability 'snapshot'")

    def _load(self, task: Task, payload: bytes) -> None:
        """Inverse of `_save`, on an environment that may never have been reset."""
        raise UsageError(f"{self.family} cannot be restored: it does not declare the capability 'snapshot'")

    def _admissible(self) -> tuple[str, ...] | None:
        """The actions that would be valid now."""
        return None

    def _state_key(self) -> str:
        """Digest of the true state."""
        return ""

    def _checkpoints(self) -> tuple[str, ...]:
        """Intermediate goals reached so far."""
        return ()

    def _usage(self) -> dict[str, float]:
        """Tokens or calls spent inside the environment so far, by name; a new dict each time."""
        return {}

    def _role(self) -> str:
        """Who acts next."""
        return "agent"

    @classmethod
    def tasks_from_path(cls, path: Path) -> TaskSet:
        """Reads tasks in the benchmark's own published format.

        Raises:
            UsageError: if the family has no such format.
        """
        raise UsageError(f"{cls.family} cannot read tasks from a path ({path}); name a task set instead")

    # What everybody calls.

    @property
    def system_prompt(self) -> str:
        """What a language model should be told before the first observation."""
        return ""

    @property
    def instruction(self) -> str:
        """The instruction of the current task."""
        return self.task.instruction if self.task else ""

    def expert(self) -> str | None:
        """The next action of a scripted expert, in this environment's action format; None where there is none."""
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:  # type: ignore[override]
        """Starts an episode.

        Args:
            seed: seeds the environment's generator, and so the draw of the task.
            options: {"task": id or position within the split, "split": split}, both optional.

        Returns:
            The first observation and its `Info`.

        Raises:
            UsageError: for an unknown option, task or split.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        unknown = set(options) - {"task", "split"}
        if unknown:
            raise choices("reset option", sorted(unknown)[0], ["task", "split"])
        split = resolve_split(self.task_set, options["split"]) if "split" in options else self.split
        if "task" in options:
            task = select_task(self.task_set, split, options["task"])
        else:
            size = self.task_set.splits[split]
            if size == 0:
                raise UsageError(
                    f"split {split!r} of {self.task_set.name} is empty; choose one of {dict(self.task_set.splits)}"
                )
            task = self.task_set.at(split, int(self.np_random.integers(size)))
        self.task = task
        self._turn = 0
        self._over = self._broken = True  # a reset that fails half-way leaves nothing to step
        outcome = self._start(task)
        self._score = outcome.score
        result = self._emit(outcome._replace(valid=True), ended=False)
        self._over = self._broken = False
        return result

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:  # type: ignore[override]
        """Takes one action. A bad one is no exception: the observation says what was wrong and the turn counts.

        Returns:
            observation, reward, terminated, truncated, info.

        Raises:
            StepOrderError: before `reset`, after the end of the episode, or after an exception: a world that broke
                in the middle of a turn gives no reward any more.
        """
        if self._over:
            self._refuse_broken()
            raise StepOrderError(
                "the episode has ended; call reset() to start another"
                if self.task is not None
                else "call reset() before step()"
            )
        self._over = self._broken = True  # stays so if anything below raises
        parsed = self._parse(action)
        if parsed.action is None:
            outcome = Outcome(f"Invalid action: {parsed.error}", valid=False, feedback=parsed.error or "")
        elif parsed.tool is not None:
            outcome = self._call_tool(parsed.tool, parsed.arguments or {})
        else:
            outcome = self._act(parsed.action)
        if parsed.error is not None or parsed.action != action:
            read = {"action": parsed.action, "valid_format": parsed.error is None}
            outcome = outcome._replace(
                valid=outcome.valid and parsed.error is None,
                feedback=outcome.feedback or parsed.error or "",
                extra={**(outcome.extra or {}), **read},
            )
        self._turn += 1
        terminated = outcome.done
        truncated = not terminated and self._turn >= self.max_turns
        before = self._score or 0.0
        if outcome.score is not None:
            self._score = outcome.score
        reward = (self._score or 0.0) - before if outcome.reward is None else outcome.reward
        observation, info = self._emit(outcome, ended=terminated or truncated)
        self._over, self._broken = terminated or truncated, False
        return observation, float(reward), terminated, truncated, info

    def snapshot(self) -> bytes:
        """The whole state of the episode, to be restored in any environment of the same class and task set.

        Raises:
            UsageError: without the capability "snapshot".
            StepOrderError: before `reset`, or after an exception that ended the episode.
        """
        self._refuse_broken()
        if self.task is None or self._info is None:
            raise StepOrderError("call reset() before snapshot()")
        return msgspec.msgpack.encode(
            Snapshot(
                version=SNAPSHOT_VERSION,
                environment=f"{self.family}-v{self.version}",
                scope=self.snapshot_scope,
                task_id=self.task.id,
                task_set=self.task_set.name,
                split=self.task.split,
                turn=self._turn,
                score=self._score,
                over=self._over,
                rng=_pack_rng(self.np_random.bit_generator.state),
                observation=self._observation,
                info=self._info,
                payload=self._save(),
            )
        )

    def restore(self, data: bytes) -> tuple[str, Info]:
        """Continues from a snapshot, in any process; the environment need not have been reset.

        Returns:
            The observation and info that the agent saw last, as `reset` returns them.

        Raises:
            UsageError: if the bytes are no snapshot, or one of another version, environment or task set.
        """
        try:
            saved = msgspec.msgpack.decode(data, type=Snapshot)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"these bytes are not a snapshot ({error}); pass what snapshot() returned") from error
        here = f"{self.family}-v{self.version}"
        if saved.version != SNAPSHOT_VERSION or saved.environment != here:
            raise UsageError(
                f"snapshot of {saved.environment} (format {saved.version}) cannot be restored in {here} "
                f"(format {SNAPSHOT_VERSION}); take it again with this version"
            )
        if saved.task_set != self.task_set.name:
            raise UsageError(
                f"snapshot was taken on task set {saved.task_set!r}, this environment plays {self.task_set.name!r}"
            )
        task = self.task_set.get(saved.task_id)
        rng = _unpack_rng(saved.rng)
        self._over = self._broken = True  # a restore that fails half-way leaves nothing to step
        try:
            self.np_random.bit_generator.state = rng
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise UsageError(f"snapshot has no usable generator state ({error}); take it again") from error
        try:
            self._load(task, saved.payload)
        except AgentGymError:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, msgspec.MsgspecError) as error:
            raise UsageError(f"snapshot has no usable state of {here} ({error!r}); take it again") from error
        self.task = task
        self._turn, self._score, self._over, self._broken = saved.turn, saved.score, saved.over, False
        self._observation, self._info = saved.observation, saved.info
        return saved.observation, saved.info.copy()

    def render(self) -> str | None:
        """The last observation, with render_mode="ansi"."""
        return self._observation if self.render_mode == "ansi" else None

    # Private.

    def _resolve_tasks(self, tasks: str | Path | TaskSet) -> TaskSet:
        if tasks == "":
            raise UsageError("tasks is empty; name a task set such as " + repr(self.default_tasks))
        if isinstance(tasks, str | Path):
            path = Path(tasks).expanduser()
            if isinstance(tasks, Path) or path.exists() or path.is_absolute() or str(tasks).startswith("."):
                return self.tasks_from_path(path)
            return make_task_set(tasks)
        if not isinstance(tasks, TaskSet):
            raise UsageError(f"tasks must be the name of a task set, a path or a TaskSet, not {tasks!r:.80}")
        return tasks

    def _refuse_broken(self) -> None:
        if self._broken:
            raise StepOrderError("an exception ended the episode; call reset() to start another")

    def _parse(self, action: str) -> Parsed:
        if not isinstance(action, str):
            return Parsed(action=None, error=f"an action is a string, not {type(action).__name__}")
        if len(action) > MAX_ACTION:
            return Parsed(action=None, error=f"an action has at most {MAX_ACTION} characters, this one {len(action)}")
        if not action.isascii():
            surrogate = find_surrogate(action)
            if surrogate >= 0:
                return Parsed(action=None, error=f"character {surrogate} is a lone surrogate, which is not text")
        return self.action_format.parse(action, self.tools)

    def _emit(self, outcome: Outcome, *, ended: bool) -> tuple[str, Info]:
        task = self.task
        assert task is not None
        success = outcome.success
        if ended and success < 0 and self._score is not None:
            success = int(self._score >= 1.0)
        observation = cut_text(outcome.observation, self.max_observation)
        info: Info = {
            "task_id": task.id,
            "kind": task.kind,
            "split": task.split,
            "turn": self._turn,
            "role": self._role(),
            "valid": outcome.valid,
            "success": success,
            "score": math.nan if self._score is None else float(self._score),
            "admissible": self._admissible(),
            "state_key": self._state_key(),
            "feedback": outcome.feedback,
            "checkpoints": self._checkpoints(),
            "usage": self._usage(),
            "extra": outcome.extra if outcome.extra is not None else {},
        }
        self._observation = observation
        self._info = info
        return observation, info.copy()


def cut_text(text: str, limit: int) -> str:
    """`text` itself, or its head and tail around a note of how much was left out, in at most `limit` characters."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} or more characters left out ...]\n"
    room = limit - len(note)
    if room <= 0:
        return text[:limit]
    head = (room + 1) // 2
    return text[:head] + note + text[len(text) - (room - head) :]


def require_capabilities(env: type[AgentEnv] | AgentEnv, needed: frozenset[str] | set[str], *, who: str) -> None:
    """Fails, before any rollout, when an environment lacks what a method or policy needs.

    Raises:
        UsageError: naming what is missing and who asks for it.
    """
    missing = sorted(set(needed) - env.capabilities)
    if missing:
        raise UsageError(
            f"{who} needs {', '.join(missing)}, which {env.family} does not offer "
            f"(it declares: {', '.join(sorted(env.capabilities)) or 'nothing'})"
        )


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _pack_rng(state: Any) -> dict[str, Any]:
    """A bit generator's state with its 128-bit integers as hexadecimal text, which MessagePack can hold."""
    if isinstance(state, Mapping):
        return {key: _pack_rng(value) for key, value in state.items()}
    return {"int": hex(state)} if isinstance(state, int) else state


def _unpack_rng(state: Any) -> Any:
    if isinstance(state, Mapping):
        if set(state) == {"int"}:
            try:
                return int(state["int"], 16)
            except (TypeError, ValueError) as error:
                raise UsageError(f"snapshot has no usable generator state ({error}); take it again") from error
        return {key: _unpack_rng(value) for key, value in state.items()}
    return state
