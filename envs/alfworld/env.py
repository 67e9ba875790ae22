"""The ALFWorld environment: household text games on the native engine, or on the alfworld package itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import msgspec
import numpy as np

from agentgym.actions import ActionFormat, ToolSpec, render_command
from agentgym.env import AgentEnv, Outcome
from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.expert import Expert
from agentgym.envs.alfworld.game import GAME_FILE, TRAJECTORY_FILE, Game, parse_game
from agentgym.envs.alfworld.planner import plan
from agentgym.envs.alfworld.textworld_backend import TextWorldEngine
from agentgym.errors import UsageError, choices
from agentgym.registry import make_task_set
from agentgym.task import Task, TaskSet


class _Saved(msgspec.Struct, frozen=True):
    """The family's part of a snapshot."""

    engine: bytes
    shuffle: int | None
    expert: dict[str, Any]


class ALFWorldEnv(AgentEnv):
    """ALFWorld (Shridhar et al. 2021, arXiv 2010.03768): one agent in one room, six kinds of household tasks.

    The text, the admissible commands and the verdict are those of the reference engine, byte for byte.

    Args:
        backend: "native", or "textworld" for the alfworld package itself in a process of its own (extra `textworld`;
            without snapshots, state keys and checkpoints).
        grammar: "file" plays a game in its own wording; "move" or "put" in the other one.
        strict_appliances: heating and cooling need the appliance open (not the reference's rule).
        domain_randomization: numbers of receptacles and objects are shuffled at each reset, as the reference does in
            training.
        expert: "scripted" (ours, closed loop, likely places first), "explorer" (the same, but it searches the possible
            places in random order), "planner" (shortest plan) or, with backend="textworld", "handcoded" (the package's,
            which cannot win most pick-two games).
        success_reward: reward of solving the task.
        compat: "verl-agent" sets action_format="verl-agent" and success_reward=10, unless given.
        **options: options of every environment: tasks, split, max_turns, max_observation, action_format, render_mode.
    """

    family: ClassVar[str] = "alfworld"
    version: ClassVar[int] = 0
    replay: ClassVar[Literal["exact", "outcome", "none"]] = "exact"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"snapshot", "admissible", "state_key", "checkpoints", "expert", "tools", "phases"}
    )
    default_tasks: ClassVar[str] = "alfworld/generated"
    default_max_turns: ClassVar[int] = 50
    prompt_templates: ClassVar[dict[str, str]] = {"verl-agent": "agentgym.envs.alfworld.prompts:verl_agent"}
    tools = (
        ToolSpec(
            name="act",
            description="Carries out one text command, such as: go to fridge 1",
            parameters={
                "type": "object",
                "properties": {"command": {"type": "string", "description": "the command, exactly as listed"}},
                "required": ["command"],
            },
        ),
    )

    def __init__(
        self,
        *,
        backend: str = "native",
        grammar: str = "file",
        strict_appliances: bool = False,
        domain_randomization: bool = False,
        expert: str = "scripted",
        success_reward: float | None = None,
        compat: str | None = None,
        action_format: str | ActionFormat | None = None,
        **options: Any,
    ) -> None:
        if backend not in ("native", "textworld"):
            raise choices("backend", backend, ["native", "textworld"])
        if grammar not in ("file", "move", "put"):
            raise choices("grammar", grammar, ["file", "move", "put"])
        experts = ["scripted", "explorer", "planner" if backend == "native" else "handcoded"]
        if expert not in experts:
            raise choices(f"expert of backend {backend!r}", expert, experts)
        if compat not in (None, "verl-agent"):
            raise choices("compat", compat, ["verl-agent"])
        if backend == "textworld" and (grammar != "file" or strict_appliances or domain_randomization):
            raise UsageError(
                "backend='textworld' plays a game as it is: leave grammar, strict_appliances and "
                "domain_randomization at their defaults"
            )
        for name, value in (("strict_appliances", strict_appliances), ("domain_randomization", domain_randomization)):
            if not isinstance(value, bool):
                raise UsageError(f"{name} must be true or false, not {value!r}")
        if success_reward is not None and (isinstance(success_reward, str) or not math.isfinite(success_reward)):
            raise UsageError(f"success_reward must be a finite number, not {success_reward!r}")
        verl = compat == "verl-agent"
        super().__init__(action_format=action_format or ("verl-agent" if verl else "raw"), **options)
        if self.action_format.name == "search-answer":
            raise UsageError(
                "action_format='search-answer' cannot carry household commands; use 'raw' or 'think-action'"
            )
        self.backend = backend
        if backend == "textworld":
            self.capabilities = self.capabilities - {"snapshot", "state_key", "checkpoints", "phases"}  # type: ignore[misc]
        self.grammar = grammar
        self.strict_appliances = strict_appliances
        self.domain_randomization = domain_randomization
        self.expert_name = expert
        self.success_reward = (10.0 if verl else 1.0) if success_reward is None else float(success_reward)
        self._engine: Engine | TextWorldEngine | None = None
        self._shuffle: int | None = None
        self._expert = Expert()
        # What the expert has not been told yet, for it is rarely asked: (action, observation, admissible commands).
        self._untold: list[tuple[str, str, tuple[str, ...]]] = []

    @classmethod
    def tasks_from_path(cls, path: Path) -> TaskSet:
        """Games in the official format: a game file, a game's folder, or a folder of games."""
        return make_task_set("alfworld/official", path=str(path))

    @property
    def system_prompt(self) -> str:
        """What the household is and how commands look."""
        put = "move {object} to {receptacle}" if self._wording() == "move" else "put {object} in/on {receptacle}"
        return _SYSTEM_PROMPT.format(put=put)

    def _wording(self) -> str:
        return self._engine.grammar if isinstance(self._engine, Engine) else "move"

    # What AgentEnv asks for.

    def _start(self, task: Task) -> Outcome:
        self._shuffle = int(self.np_random.integers(2**31)) if self.domain_randomization else None
        if self.backend == "textworld":
            self._start_textworld(task)
        else:
            self._engine = self._make_engine(task)
        assert self._engine is not None
        text = self._engine.reset()
        explores = self.expert_name == "explorer"
        self._expert = Expert(order="random", rng=self.np_random) if explores else Expert()
        self._expert.reset(text, self._engine.admissible())
        self._untold = []
        return Outcome(text, score=0.0, extra=self._extra(valid=True))

    def _act(self, action: str) -> Outcome:
        engine = self._engine
        assert engine is not None
        text = engine.step(action)
        valid = engine.valid_last
        self._untold.append((action, text, engine.admissible()))
        won = engine.won
        return Outcome(
            text,
            valid=valid,
            score=float(won),
            success=1 if won else -1,
            done=won,
            reward=self.success_reward * won,
            extra=self._extra(valid=valid),
        )

    def _call_tool(self, tool: str, arguments: dict[str, Any]) -> Outcome:
        command = arguments.get("command")
        if tool != "act" or not isinstance(command, str):
            return Outcome('Call the tool act with {"command": "..."}.', valid=False)
        return self._act(command)

    def _save(self) -> bytes:
        engine = self._native()
        return msgspec.msgpack.encode(_Saved(engine.snapshot(), self._shuffle, self._tell_expert().to_state()))

    def _load(self, task: Task, payload: bytes) -> None:
        self._native(required=False)
        try:
            saved = msgspec.msgpack.decode(payload, type=_Saved)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"snapshot has no ALFWorld state ({error}); take it again") from error
        self._shuffle = saved.shuffle
        engine = self._make_engine(task)
        engine.restore(saved.engine)
        self._engine = engine
        self._expert = Expert.from_state(saved.expert)
        self._untold = []

    def _admissible(self) -> tuple[str, ...] | None:
        return None if self._engine is None else self._engine.admissible()

    def _state_key(self) -> str:
        return self._engine.state_key() if isinstance(self._engine, Engine) else ""

    def _checkpoints(self) -> tuple[str, ...]:
        if not isinstance(self._engine, Engine):
            return ()
        engine = self._engine
        return tuple(f"seen {name}" for name in engine.visited) + tuple(f"found {name}" for name in engine.found)

    def expert(self) -> str | None:
        """The next command of the chosen expert, in this environment's action format."""
        command = self._expert_command()
        return None if command is None else render_command(self.action_format, self.tools, command)

    def close(self) -> None:
        """Ends the reference's process, if there is one."""
        if isinstance(self._engine, TextWorldEngine):
            self._engine.close()
            self._engine = None

    # Private.

    def _native(self, *, required: bool = True) -> Engine:
        if self.backend != "native":
            raise UsageError("backend='textworld' has no snapshots; use backend='native'")
        if required and not isinstance(self._engine, Engine):
            raise UsageError("call reset() before snapshot()")
        return cast(Engine, self._engine)

    def _make_engine(self, task: Task) -> Engine:
        game = _parse(self.task_set, task, self._shuffle) if self._shuffle is not None else _game(self.task_set, task)
        return Engine(
            game,
            grammar=cast(Literal["file", "move", "put"], self.grammar),
            strict_appliances=self.strict_appliances,
        )

    def _start_textworld(self, task: Task) -> None:
        files = {name: self.task_set.open(task, name) for name in (GAME_FILE, TRAJECTORY_FILE)}
        if isinstance(self._engine, TextWorldEngine) and not self._engine.closed:
            self._engine.load(files)
        else:
            self._engine = TextWorldEngine(
                files,
                package_expert=self.expert_name == "handcoded",
                seed=int(self.np_random.integers(2**31)),
            )

    def _extra(self, *, valid: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {"in_admissible": valid}
        if isinstance(self._engine, Engine):
            extra["phase"] = _phase(self._engine)
        return extra

    def _expert_command(self) -> str | None:
        engine = self._engine
        if engine is None or self._over:
            return None
        if isinstance(engine, TextWorldEngine) and self.expert_name == "handcoded":
            return engine.expert_command
        if isinstance(engine, Engine) and self.expert_name == "planner":
            commands = plan(engine)
            return commands[0] if commands else "look"
        return self._tell_expert().next_action()

    def _tell_expert(self) -> Expert:
        for action, observation, admissible in self._untold:
            self._expert.observe(action, observation, admissible)
        self._untold = []
        return self._expert


def _phase(engine: Engine) -> str:
    """What remains to be done: "find" the object, "treat" it (clean, heat, cool, light), or "place" it."""
    goal = engine.game.goal
    if engine.held is None:
        return "find"
    index = engine.game.object_index[engine.held]
    if not engine.game.goal_objects >> index & 1:
        return "find"
    if goal.toggle_type or not set(goal.states) <= engine.object_states(engine.held):
        return "treat"
    return "place"


def _parse(tasks: TaskSet, task: Task, shuffle: int | None) -> Game:
    generator = None if shuffle is None else np.random.default_rng(shuffle)
    return parse_game(tasks.open(task, GAME_FILE), tasks.open(task, TRAJECTORY_FILE), name=task.id, shuffle=generator)


def _game(tasks: TaskSet, task: Task) -> Game:
    """Games are immutable, so the environments of a process share them."""
    key = (tasks.name, tasks.digest, task.id)
    game = _games.get(key)
    if game is None:
        game = _parse(tasks, task, None)
        while len(_games) >= _GAMES_KEPT:
            _games.pop(next(iter(_games)), None)
        _games[key] = game
    return game


_GAMES_KEPT = 256
_games: dict[tuple[str, str, str], Game] = {}

_SYSTEM_PROMPT = """\
You control a household robot in one room, by text. The room holds receptacles (cabinets, tables, a fridge ...), and
objects lie in or on them. You see what a receptacle holds only when you are at it, and inside one only when it is open.
You can carry one object at a time. Reply with exactly one command. The commands are:
go to {{receptacle}} | open {{receptacle}} | close {{receptacle}} | take {{object}} from {{receptacle}} | {put} |
clean {{object}} with {{receptacle}} | heat {{object}} with {{receptacle}} | cool {{object}} with {{receptacle}} |
use {{lamp}} | slice {{object}} with {{knife}} | examine {{thing}} | inventory | look
Names always carry their number, as in: take apple 1 from fridge 1. A command that cannot be carried out is answered
with "Nothing happens." and still costs a turn."""
