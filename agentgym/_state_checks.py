"""Checks of several plays against each other: determinism, snapshots and state keys."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec
from gymnasium.utils.env_checker import check_env

from agentgym._probe import (
    Flat,
    Problem,
    Step,
    Subject,
    check,
    continue_elsewhere,
    difference,
    flat_step,
    flatten,
    follow,
    global_generators,
    global_state,
    record_elsewhere,
    take,
    transcript,
    walk,
)
from agentgym.actions import render_command
from agentgym.env import AgentEnv
from agentgym.errors import StepOrderError, UsageError

_SOUND = ("determinism", "global_random", "fresh_reset", "interleaving")
_WHOLE = (*_SOUND, "observations", "rewards", "infos", "shared_infos", "ends", "order")
_NO_LIMIT = 1_000_000


def _seeds(subject: Subject) -> list[int]:
    return [subject.seed, subject.seed + 1, subject.seed]


def _record(subject: Subject, global_seed: int) -> list[Flat]:
    with global_generators(global_seed), subject.env() as env:
        return transcript(env, _seeds(subject), subject.turns)


@check("equal seeds give equal observations, rewards and infos")
def determinism(subject: Subject) -> Iterator[Problem]:
    first, second = _record(subject, 1), _record(subject, 1)
    mend = "Draw only from self.np_random; keep clocks, uuids, id() and set order out of observations and infos"
    if found := difference(first, second):
        yield f"two plays of the same seeds differ: {found}", mend


@check("Python's and NumPy's global generators are neither used nor changed", after=("determinism",))
def global_random(subject: Subject) -> Iterator[Problem]:
    mend = "Draw from self.np_random, never from `random` or `np.random` themselves"
    if found := difference(_record(subject, 1), _record(subject, 2)):
        yield f"plays depend on the global generators: {found}", mend
    with global_generators(3):
        before = global_state()
        with subject.env() as env:
            transcript(env, _seeds(subject), subject.turns)
        if global_state() != before:
            yield "a play changes the state of a global generator", mend


@check("an episode does not depend on those played before it", after=("determinism", "global_random"))
def fresh_reset(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        expected = transcript(env, [subject.seed], subject.turns)
    with subject.env() as env:
        for _ in walk(env, subject.seed + 1, max(1, subject.turns // 2)):
            pass
        if found := difference(expected, transcript(env, [subject.seed], subject.turns)):
            yield f"a seed gives another episode after one was played half-way: {found}", "Set all state up in _start"


@check("two environments played in turn give what each gives alone", after=("determinism", "global_random"))
def interleaving(subject: Subject) -> Iterator[Problem]:
    alone = []
    for i in range(2):
        with subject.env() as env:
            alone.append(transcript(env, [subject.seed + i], subject.turns))
    together: list[list[Flat]] = [[], []]
    with subject.env() as one, subject.env() as two:
        walks = [walk(env, subject.seed + i, subject.turns) for i, env in enumerate((one, two))]
        while any(steps := [next(each, None) for each in walks]):
            for record, step in zip(together, steps, strict=True):
                record += [] if step is None else [flat_step(step)]
    for i in range(2):
        if found := difference(alone[i], together[i]):
            yield (
                f"an environment played beside another one gives another episode: {found}",
                "Keep state in the instance, not in the class or the module",
            )
            return


@check("another process with another PYTHONHASHSEED gives the same episodes", after=_SOUND, elsewhere=True)
def other_process(subject: Subject) -> Iterator[Problem]:
    first, second = (record_elsewhere(subject, _seeds(subject), hash_seed) for hash_seed in ("1", "2"))
    if found := difference(first, second):
        yield f"two processes differ: {found}", "Sort sets before their order shows; use hashlib, not hash()"


# Snapshots.


@check("a restored snapshot continues as the original does", needs=("snapshot",), after=_WHOLE)
def snapshot_continuation(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        played = list(walk(env, subject.seed, subject.turns))
    expected = [flat_step(step) for step in played]
    actions = [step.action for step in played if step.action is not None]
    for at in sorted({0, len(actions) // 2, len(actions) - 1, len(actions)}):
        with subject.env() as original, subject.env() as fresh:
            follow(original, subject.seed, actions[:at])
            saved = original.snapshot()
            mend = "Save in _save all that _act reads, copies of it, and set all of it in _load"
            if found := difference(expected[at + 1 :], _go_on(original, actions[at:])):
                yield f"taking a snapshot at turn {at} changes the episode: {found}", mend
                return
            for env, where in ((fresh, "a fresh environment"), (original, "the environment it was taken in")):
                observation, info = env.restore(saved)
                shown = flatten({"observation": observation, "info": info})
                if found := difference([{key: expected[at].get(key, "absent") for key in shown}], [shown]):
                    yield f"restore() at turn {at} does not return what the agent saw last: {found}", mend
                    return
                if found := difference(expected[at + 1 :], _go_on(env, actions[at:])):
                    yield f"restored in {where} at turn {at}, the episode goes on otherwise: {found}", mend
                    return
                if at == len(actions) and played[-1].ended and _steps(env):
                    yield "a snapshot of an ended episode can be stepped on", "Leave the end to AgentEnv.restore"
                    return


def _go_on(env: AgentEnv, actions: list[str]) -> list[Flat]:
    return [flat_step(take(env, action)) for action in actions]


def _steps(env: AgentEnv) -> bool:
    try:
        env.step("look")
    except StepOrderError:
        return False
    return True


@check("a restored copy and its original do not disturb one another", needs=("snapshot",), after=_WHOLE)
def snapshot_isolation(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        actions = [step.action for step in walk(env, subject.seed, subject.turns) if step.action is not None]
    at = len(actions) // 2
    with subject.env() as env:
        follow(env, subject.seed, actions[:at])
        expected = _go_on(env, actions[at:])
    with subject.env() as original, subject.env() as copy, subject.env() as other:
        follow(original, subject.seed, actions[:at])
        saved = original.snapshot()
        copy.restore(saved)
        other.restore(saved)
        _go_on(copy, actions[at:])
        for env, name in ((other, "a second copy"), (original, "the original")):
            if found := difference(expected, _go_on(env, actions[at:])):
                yield (
                    f"playing a restored copy changes {name}: {found}",
                    "Let _save serialize the state and _load build a new one; share nothing mutable",
                )
                return


@check("equal states give equal snapshot bytes", needs=("snapshot",), after=_WHOLE)
def snapshot_bytes(subject: Subject) -> Iterator[Problem]:
    with subject.env() as one, subject.env() as two:
        for left, right in zip(
            walk(one, subject.seed, subject.turns), walk(two, subject.seed, subject.turns), strict=False
        ):
            saved = one.snapshot()
            mend = "Serialize in a fixed order: sort sets, and write no clock or counter"
            if one.snapshot() != saved:
                yield f"{left.where}, two snapshots of one state differ", mend
            elif two.snapshot() != saved:
                yield f"{right.where}, snapshots of two equal plays differ", mend
            else:
                with subject.env() as fresh:
                    fresh.restore(saved)
                    if fresh.snapshot() == saved:
                        continue
                yield f"{left.where}, a snapshot of the restored state differs from the snapshot restored", mend
            return


@check(
    "a snapshot continues in another process",
    needs=("snapshot",),
    after=(*_WHOLE, "other_process", "snapshot_continuation"),
    elsewhere=True,
)
def snapshot_elsewhere(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        actions = [step.action for step in walk(env, subject.seed, subject.turns) if step.action is not None]
    at = len(actions) // 2
    with subject.env() as env:
        follow(env, subject.seed, actions[:at])
        saved = env.snapshot()
        observation, info = env.restore(saved)
        expected = [flatten({"observation": observation, "info": info}), *_go_on(env, actions[at:])]
    mend = "Put all state into the bytes of _save; objects, module variables and files of this process stay behind"
    try:
        found = difference(expected, continue_elsewhere(subject, saved, actions[at:], "1"))
    except RuntimeError as error:
        found = str(error)
    if found:
        yield f"taken at turn {at} and restored in another process, a snapshot does not go on: {found}", mend


@check("damaged snapshots are refused with UsageError", needs=("snapshot",), after=_WHOLE)
def snapshot_damage(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env:
        for _ in walk(env, subject.seed, 3):
            pass
        saved = env.snapshot()
    fields = msgspec.msgpack.decode(saved)
    rng = random.Random(subject.seed)
    cases = [(f"cut to {size} bytes", saved[:size], True) for size in (0, 1, len(saved) // 2, len(saved) - 1)]
    cases += [("of random bytes", rng.randbytes(64), True), ("with more bytes behind it", saved + b"\x00", True)]
    for key, value in (("version", -1), ("environment", "other-v0"), ("task_set", "other"), ("task_id", "none such")):
        cases.append((f"with {key} {value!r}", msgspec.msgpack.encode({**fields, key: value}), True))
    payload: bytes = fields["payload"]
    for damaged in {b"", payload[: len(payload) // 2], b"\xc1" + payload} - {payload}:
        name = f"with a payload of {len(damaged)} instead of {len(payload)} bytes"
        cases.append((name, msgspec.msgpack.encode({**fields, "payload": damaged}), True))
    for _ in range(200):
        flipped = bytearray(saved)
        place = rng.randrange(len(saved))
        flipped[place] ^= 1 << rng.randrange(8)
        cases.append((f"with a bit flipped in byte {place}", bytes(flipped), False))
    mend = "Check in _load what the payload holds, and raise UsageError"
    with subject.env() as env:
        for name, data, must_refuse in cases:
            try:
                env.restore(data)
            except UsageError:
                continue
            except Exception as error:
                yield f"a snapshot {name} raises {type(error).__name__} ({error!s:.100})", mend
                return
            if must_refuse:
                yield f"a snapshot {name} is accepted", mend
                return


# State keys.


def _future(env: AgentEnv, saved: bytes, generator: Any) -> list[Flat]:
    """What can be observed from a state on: every action one level deep, and a few walks to a depth of eight.

    Random draws are the same for all states, as a state key leaves them out; turn counts are not looked at.
    """

    def look(step: Step) -> Flat:
        seen = {key: step.info.get(key) for key in ("valid", "score", "success", "admissible")}
        text = None if step.action is None else step.observation
        return flatten({"action": step.action, "observation": text, "ended": step.terminated, "info": seen})

    def again() -> Step:
        observation, info = env.restore(saved)
        env.np_random.bit_generator.state = generator
        # How the state was reached is no part of it.
        return Step(None, observation, 0.0, False, False, {**info, "valid": True})

    first = again()
    seen = [look(first)]
    commands = list(first.info["admissible"] or ())
    for command in commands[:40]:
        again()
        seen.append(look(take(env, render_command(env.action_format, env.tools, command))))
    for i in range(6):
        rng = random.Random(i)
        step = again()
        for _ in range(8):
            choice = list(step.info["admissible"] or ())
            if step.ended or not choice:
                break
            step = take(env, render_command(env.action_format, env.tools, rng.choice(choice)))
            seen.append(look(step))
    return seen


_KEY_NEEDS = (*_WHOLE, "capabilities", "admissible", "snapshot_continuation", "snapshot_isolation")


def _branches(
    subject: Subject, env: AgentEnv, per_state: int
) -> Iterator[tuple[bytes, list[tuple[str, bytes, str]], Any]]:
    """States of a play with some of their children: (snapshot, (action, snapshot, key) of each, generator)."""
    rng = random.Random(subject.seed)
    for i in range(2):
        env.max_turns = _NO_LIMIT
        for number, step in enumerate(walk(env, subject.seed + i, subject.turns)):
            if step.ended or number % 3:
                continue
            here, generator = env.snapshot(), env.np_random.bit_generator.state
            commands = list(step.info["admissible"] or ())
            children = []
            for command in rng.sample(commands, min(len(commands), per_state)):
                env.restore(here)
                child = take(env, render_command(env.action_format, env.tools, command))
                if not child.ended:
                    children.append((command, env.snapshot(), child.info["state_key"]))
            yield here, children, generator
            env.restore(here)


@check(
    "two independent actions in either order lead to the same state key",
    needs=("state_key", "snapshot", "admissible"),
    after=_KEY_NEEDS,
)
def state_key_order(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env, subject.env() as probe:
        probe.max_turns = _NO_LIMIT
        for _, children, generator in _branches(subject, env, 5):
            for (a, after_a, _), (b, after_b, _) in combinations(children, 2):
                ends = []
                for saved, second in ((after_a, b), (after_b, a)):
                    probe.restore(saved)
                    step = take(probe, render_command(probe.action_format, probe.tools, second))
                    if step.ended or not step.info["valid"]:
                        break
                    ends.append((step.info["state_key"], probe.snapshot()))
                if len(ends) < 2 or ends[0][0] == ends[1][0]:
                    continue
                if _future(probe, ends[0][1], generator) == _future(probe, ends[1][1], generator):
                    yield (
                        f"{a!r:.50} and {b!r:.50} in either order have the same future, but their state keys differ",
                        "Leave out of _state_key how a state was reached: histories, counters, orders of sets",
                    )
                    return


@check("equal state keys have equal futures", needs=("state_key", "snapshot", "admissible"), after=_KEY_NEEDS)
def state_key_future(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env, subject.env() as probe:
        probe.max_turns = _NO_LIMIT
        for _, children, generator in _branches(subject, env, 12):
            known: dict[str, tuple[str, list[Flat]]] = {}
            for command, saved, key in children:
                if sum(key == other for _, _, other in children) < 2:
                    continue
                future = _future(probe, saved, generator)
                other, expected = known.setdefault(key, (command, future))
                if found := difference(expected, future):
                    yield (
                        f"{other!r:.50} and {command!r:.50} lead to one state key, but not to one future: {found}",
                        "Put into _state_key everything that what can still happen depends on",
                    )
                    return


@check("Gymnasium's own check passes", after=(*_WHOLE, "bad_actions", "faults", "reset_options"))
def gymnasium_check(subject: Subject) -> Iterator[Problem]:
    with subject.env() as env, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_env(env, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            yield (
                f"gymnasium.utils.env_checker says: {error!s:.300}",
                "Compare with gymnasium.utils.env_checker.check_env and its documentation",
            )


CHECKS = (
    determinism,
    global_random,
    fresh_reset,
    interleaving,
    other_process,
    snapshot_continuation,
    snapshot_isolation,
    snapshot_bytes,
    snapshot_elsewhere,
    snapshot_damage,
    state_key_order,
    state_key_future,
    gymnasium_check,
)
