"""Checks of one play: what is returned, in which order, and that a bad action is no exception."""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from agentgym._probe import Problem, Step, Subject, check, choose, follow, start, take, walk
from agentgym.actions import render_command
from agentgym.env import CAPABILITIES, INFO_KEYS, AgentEnv, Outcome
from agentgym.errors import AgentGymError, InfrastructureError, StepOrderError, UsageError
from agentgym.spaces import find_surrogate

_EPISODES = 3


def observation_problem(env: AgentEnv, observation: Any) -> str | None:
    """What keeps an observation out of its space, or None."""
    if not isinstance(observation, str):
        return f"the observation is of type {type(observation).__name__}, not str"
    if len(observation) > env.max_observation:
        return (
            f"the observation has {len(observation)} characters, {env.observation_space} allows {env.max_observation}"
        )
    if (surrogate := find_surrogate(observation)) >= 0:
        return f"the observation has a lone surrogate at index {surrogate}"
    return None if env.observation_space.contains(observation) else f"the observation is not in {env.observation_space}"


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError):
        return False
    return isinstance(value, dict)


_INFO_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "task_id": ("a non-empty str", lambda value: isinstance(value, str) and value != ""),
    "kind": ("a str", lambda value: isinstance(value, str)),
    "split": ("a str", lambda value: isinstance(value, str)),
    "turn": ("an int of at least 0", lambda value: type(value) is int and value >= 0),
    "role": ("a non-empty str", lambda value: isinstance(value, str) and value != ""),
    "valid": ("a bool", lambda value: isinstance(value, bool)),
    "success": ("-1, 0 or 1", lambda value: type(value) is int and value in (-1, 0, 1)),
    "score": ("in [0, 1], or NaN while unknown", lambda value: _is_number(value) and not (value < 0 or value > 1)),
    "admissible": ("a tuple of str, or None", lambda value: value is None or _is_names(value)),
    "state_key": ("a str", lambda value: isinstance(value, str)),
    "feedback": ("a str", lambda value: isinstance(value, str)),
    "checkpoints": ("a tuple of str", _is_names),
    "usage": (
        "a dict of finite numbers",
        lambda value: isinstance(value, dict) and all(_is_number(x) and math.isfinite(x) for x in value.values()),
    ),
    "extra": ("a dict of plain JSON values", _is_plain),
}


def info_problems(info: Any) -> list[str]:
    """Which keys of an info are missing, unknown or of the wrong type."""
    if not isinstance(info, dict):
        return [f"the info is of type {type(info).__name__}, not dict"]
    missing = [key for key in INFO_KEYS if key not in info]
    unknown = [key for key in info if key not in INFO_KEYS]
    problems = [f"info lacks {missing}"] if missing else []
    problems += [f"info has unknown keys {unknown}"] if unknown else []
    for key, (wanted, holds) in _INFO_RULES.items():
        if key in info and not holds(info[key]):
            problems.append(f"info[{key!r}] must be {wanted}, not {info[key]!r:.80}")
    return problems


def _plays(subject: Subject) -> Iterator[tuple[AgentEnv, Step]]:
    with subject.env() as env:
        for i in range(_EPISODES):
            for step in walk(env, subject.seed + i, subject.turns):
                yield env, step


@check("observations lie in the observation space until the episode ends")
def observations(subject: Subject) -> Iterator[Problem]:
    for env, step in _plays(subject):
        problem = None if step.ended else observation_problem(env, step.observation)
        if problem:
            yield (
                f"{step.where}, {problem}",
                "Return text from _start and _act, decoded with errors='replace'; AgentEnv cuts what is too long",
            )
            return


@check("rewards are finite numbers, terminated and truncated are bools")
def rewards(subject: Subject) -> Iterator[Problem]:
    for _, step in _plays(subject):
        if not (_is_number(step.reward) and math.isfinite(step.reward)):
            yield f"{step.where}, the reward is {step.reward!r:.60}", "Return a finite float, or None for the score's"
            return
        if type(step.terminated) is not bool or type(step.truncated) is not bool:
            flags = f"{step.terminated!r:.40} and {step.truncated!r:.40}"
            yield f"{step.where}, terminated and truncated are {flags}", "Return Python's own True or False"
            return


@check("infos hold the documented keys and types until the episode ends")
def infos(subject: Subject) -> Iterator[Problem]:
    for env, step in _plays(subject):
        problems = [] if step.ended else info_problems(step.info)
        if not problems and not step.ended and env.task is not None and step.info["task_id"] != env.task.id:
            problems = [f"info['task_id'] is {step.info['task_id']!r}, the task being played {env.task.id!r}"]
        if step.action is None and not problems and step.info["turn"] != 0:
            problems = [f"info['turn'] is {step.info['turn']} at reset"]
        if problems:
            for problem in problems:
                yield (
                    f"{step.where}, {problem}",
                    "Let AgentEnv.step and reset make the info; put extras in info['extra']",
                )
            return


@check("no mutable object is shared between the infos of successive calls")
def shared_infos(subject: Subject) -> Iterator[Problem]:
    last: dict[int, tuple[str, Any]] = {}
    for _, step in _plays(subject):
        here = {id(value): (path, value) for path, value in _mutables(step.info, "info")}
        for key in here.keys() & last.keys():
            yield (
                f"{step.where}, {here[key][0]} is the same object as {last[key][0]} of the call before",
                "Return a new dict or list at every turn, so that kept infos do not change afterwards",
            )
            return
        last = here


def _mutables(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | set | bytearray | np.ndarray):
        yield path, value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _mutables(part, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _mutables(part, f"{path}[{i}]")


@check(
    "the last observation and info are complete, and truncation comes exactly at max_turns",
    after=("observations", "infos"),
)
def ends(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        limit = env.max_turns
        # Idling reaches max_turns almost everywhere; sensible actions reach the end that the task itself has.
        for max_turns, idle in ((1, True), (min(3, limit), True), (min(200, limit), False)):
            env.max_turns = max_turns
            found = list(_end_of_play(env, subject.seed, idle=idle))
            yield from found
            if found:
                return


def _end_of_play(env: AgentEnv, seed: int, *, idle: bool) -> Iterator[Problem]:
    mend = "Leave truncation to AgentEnv.step"
    rng = random.Random(seed)
    step = start(env, seed)
    for taken in range(1, env.max_turns + 1):
        step = take(env, "do nothing" if idle else choose(env, step.info, rng))
        if step.truncated and taken < env.max_turns:
            yield f"truncated at turn {taken} of max_turns={env.max_turns}", mend
        if step.ended:
            yield from _end_problems(env, step, taken)
            return
    yield f"not truncated at turn {env.max_turns}, which is max_turns", mend


def _end_problems(env: AgentEnv, step: Step, taken: int) -> Iterator[Problem]:
    how = "truncation" if step.truncated else "termination"
    problem = observation_problem(env, step.observation)
    if problem is None and not step.observation:
        problem = "the observation is empty"
    if problem:
        yield f"at {how}, {problem}", "Return the observation that the last action led to; the agent learns from it"
    broken = info_problems(step.info)
    if not broken and step.info["turn"] != taken:
        broken = [f"info['turn'] is {step.info['turn']} after {taken} actions: is the next episode already begun?"]
    if not broken and step.info["success"] < 0:
        broken = ["info['success'] is still -1"]
    for each in broken:
        yield f"at {how}, {each}", "Return the whole info of the episode that ended; success is 0 or 1 then"


@check("a call out of order raises StepOrderError")
def order(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        yield from _must_refuse(env, "look", "step() before reset()")
    with subject.env() as env:
        env.max_turns = min(2, env.max_turns)
        *_, last = walk(env, subject.seed, env.max_turns + 10)
        if not last.ended:
            return
        yield from _must_refuse(env, "look", "step() after the end of the episode")
        start(env, subject.seed)
        take(env, "look")


def _must_refuse(env: AgentEnv, action: str, what: str) -> Iterator[Problem]:
    mend = "Leave the order of calls to AgentEnv.step and do not clear its flags"
    try:
        env.step(action)
    except StepOrderError:
        return
    except Exception as error:
        yield f"{what} raises {type(error).__name__} ({error}), not StepOrderError", mend
    else:
        yield f"{what} is carried out", mend


_STRANGE = (
    "",
    " ",
    "\n\n",
    "\x00",
    "\x1b[2J\x07\r\x08",
    "a\u0301\u202e\u05d0 \U0001f642 \uffff",
    "\ud800",
    "x" * 5_000,
    "x" * 40_000,
    "0",
    "-1",
    "1e999",
    "None",
    "{}",
    '{"name": "act", "arguments": {"command": null}}',
    '[[[["',
    "<action></action>",
    "</action><action>look",
    "<think>x</think><action>look</action>",
    "%s %d {0} {x} \\1 $(ls) `ls` ' \" ;",
    "../../etc/passwd",
    "(" * 500,
)


@check("no action raises, and each one, invalid or not, counts a turn")
def bad_actions(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        step = start(env, subject.seed)
        pool = list(_STRANGE)
        for command in list(step.info.get("admissible") or ())[:6]:
            pool += [command.upper(), command.title(), f" {command} ", command[:-1], command + " " + command]
        turn = 0
        for action in pool:
            if step.ended:
                step, turn = start(env, subject.seed), 0
            try:
                step = take(env, action)
            except Exception as error:
                yield (
                    f"the action {action!r:.60} raises {type(error).__name__} ({error!s:.100})",
                    "Return Outcome(what was wrong, valid=False) from _act; only a broken world raises",
                )
                step, turn = start(env, subject.seed), 0
                continue
            turn += 1
            if step.info.get("turn", turn) != turn and not step.ended:
                yield (
                    f"info['turn'] is {step.info['turn']} after {turn} actions, the last one {action!r:.60}",
                    "Count every action, or an agent can act for ever; AgentEnv.step does it",
                )
                return


@check("after a fault of the world no reward is given until reset")
def faults(subject: Subject) -> Iterator[Problem]:
    mend = "Let InfrastructureError pass through step, and nothing but reset() begin again"
    with subject.env() as env:
        step = start(env, subject.seed)
        struck: list[str] = []

        def strike(*_: Any) -> Outcome:
            struck.append("")
            raise InfrastructureError("a fault that the checker made")

        action = choose(env, step.info, random.Random(0))
        hooks = {"_act": strike, "_call_tool": strike}
        vars(env).update(hooks)
        try:
            step = take(env, action)
        except InfrastructureError:
            pass
        else:
            if struck:
                yield f"a fault in _act comes back as a turn with reward {step.reward!r}", mend
                return
        finally:
            for hook in hooks:
                del vars(env)[hook]
        if not struck:
            return
        try:
            step = take(env, action)
        except AgentGymError:
            pass
        else:
            yield f"the step after a fault is carried out, with reward {step.reward!r}", mend
        start(env, subject.seed)
        take(env, action)


@check("reset plays the task that its options name, and refuses unknown ones")
def reset_options(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        size = env.task_set.splits[env.split]
        for index in sorted({0, size // 2, size - 1}):
            wanted = env.task_set.at(env.split, index).id
            for which in (index, wanted):
                got = start(env, subject.seed, {"task": which}).info["task_id"]
                if got != wanted:
                    yield (
                        f"reset(options={{'task': {which!r}}}) plays {got!r}, not {wanted!r}",
                        "Play the Task given to _start; AgentEnv.reset selects it",
                    )
        for split in env.task_set.splits:
            if env.task_set.splits[split]:
                got = start(env, subject.seed, {"split": split}).info["split"]
                if got != split:
                    yield f"reset(options={{'split': {split!r}}}) plays split {got!r}", "Set Task.split in the task set"
        unknown: tuple[dict[str, Any], ...] = (
            {"task": "no such task \u2603"},
            {"task": size},
            {"task": -1},
            {"split": "no such split"},
            {"no such option": 1},
        )
        for options in unknown:
            try:
                env.reset(seed=subject.seed, options=options)
            except UsageError:
                continue
            except Exception as error:
                what = f"raises {type(error).__name__} ({error!s:.80})"
            else:
                what = "is accepted"
            yield f"reset(options={options!r}) {what}", "Raise UsageError and say what there is instead"


@check("declared capabilities exist, and undeclared ones do not appear", after=("observations", "infos"))
def capabilities(subject: Subject) -> Iterator[Problem]:
    mend = "Declare in `capabilities` exactly what the family offers"
    declared = subject.capabilities
    if unknown := sorted(declared - CAPABILITIES):
        yield f"unknown capabilities {unknown}", f"Declare only {', '.join(sorted(CAPABILITIES))}"
    for env, step in _plays(subject):
        quiet = {
            "admissible": step.info.get("admissible") is None,
            "state_key": not step.info.get("state_key"),
            "checkpoints": not step.info.get("checkpoints"),
            "feedback": not (step.info.get("feedback") and step.info.get("valid")),
            "expert": step.ended or env.expert() is None,
            "tools": not env.tools,
        }
        shown = sorted(name for name, absent in quiet.items() if not absent and name not in declared)
        lacking = {"admissible", "state_key", "tools"} | ({"expert"} if step.action is None else set())
        lacking = {name for name in lacking & declared if quiet[name] and not step.ended}
        if "process_score" in declared and math.isnan(step.info.get("score", 0.0)):
            lacking.add("process_score")
        for name in shown:
            yield f"{step.where}, {name} appears though it is not declared", mend
        for name in sorted(lacking):
            yield f"{step.where}, {name} is declared but absent", mend
        if shown or lacking:
            break
    with subject.env() as env:
        start(env, subject.seed)
        try:
            env.snapshot()
        except UsageError:
            saves = False
        else:
            saves = True
        if saves != ("snapshot" in declared):
            yield (
                f"snapshot() {'works' if saves else 'is refused'} though it is{'' if not saves else ' not'} declared",
                mend,
            )


@check("what is listed as admissible is accepted as valid", needs=("admissible",), after=("determinism", "ends"))
def admissible(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        actions: list[str] = []
        for step in list(walk(env, subject.seed, min(subject.turns, 8))):
            if step.ended:
                return
            actions += [] if step.action is None else [step.action]
            commands = step.info["admissible"] or ()
            if len(set(commands)) != len(commands):
                yield f"{step.where}, an admissible action is listed twice", "List each action once"
                return
            for command in commands[:: max(1, len(commands) // 8)]:
                follow(env, subject.seed, actions)
                answer = take(env, render_command(env.action_format, env.tools, command))
                if not answer.info["valid"]:
                    yield (
                        f"{step.where}, the admissible action {command!r:.60} is refused: {answer.observation!r:.80}",
                        "List in _admissible only what _act accepts in that state",
                    )
                    return


@check("what the expert says is accepted as valid", needs=("expert",), after=("ends",))
def expert(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        step = start(env, subject.seed)
        for _ in range(max(subject.turns, min(env.max_turns, 60))):
            if step.ended:
                return
            action = env.expert()
            if action is None:
                return
            if not isinstance(action, str):
                yield f"{step.where}, the expert says {action!r:.60}", "Return a str from expert(), or None"
                return
            step = take(env, action)
            if not step.info.get("valid", True):
                yield (
                    f"the expert's action {action!r:.60} is refused: {step.observation!r:.80}",
                    "Return from expert() an action that is valid in the current state, in the environment's format",
                )
                return


CHECKS = (
    observations,
    rewards,
    infos,
    shared_infos,
    ends,
    order,
    bad_actions,
    faults,
    reset_options,
    capabilities,
    admissible,
    expert,
)
