"""A scripted ALFWorld expert that knows only what an agent knows: texts and admissible commands.

It looks for the target where such things usually lie, treats it, brings it to its place, and can be asked at any turn,
whatever was done before. `observe` updates what it believes; `next_action` decides from that and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from agentgym.envs.alfworld.places import APPLIANCES, PLACES_OF
from agentgym.envs.alfworld.wording import TASK_PREFIX
from agentgym.errors import UsageError, choices

Order = Literal["likely", "random"]

_TASKS = (
    ("two", r"(?:put two (?P<thing>\S+) in|find two (?P<thing2>\S+) and put them in) (?P<place>\S+)"),
    ("", r"put a (?P<kind>clean|hot|cool) (?P<thing>\S+) in (?P<place>\S+)"),
    ("", r"(?P<kind>clean|heat|cool) some (?P<thing>\S+) and put it in (?P<place>\S+)"),
    ("light", r"look at (?P<thing>\S+) under the (?P<lamp>\S+)|examine the (?P<thing2>\S+) with the (?P<lamp2>\S+)"),
    ("simple", r"put (?:a|some) (?P<thing>\S+) (?:in|on) (?P<place>\S+)"),
)
_UNREADABLE = "unreadable"  # its sentence stands in place of the thing
_UNDONE_BY = {"heat": "cool", "cool": "heat"}

_CONTENTS = re.compile(r"(?:On the (.+?)|The (\S+ \d+) is open\. In it), you see (.+)\.$", re.MULTILINE)
_FACING = re.compile(r"You are facing the (.+?)\. Next to it")
_TAKEN = re.compile(r"You pick up the (.+) from the (.+)\.$")
_PLACED = re.compile(r"You (?:move the (.+) to|put the (.+) in/on) the (.+)\.$")
_TREATED = re.compile(r"You (heat|cool|clean) the (.+) using the (.+)\.$")
_LIT = re.compile(r"You turn on the (.+)\.$")

# How much is usually seen at one go, and how much work it is: wide surfaces, other surfaces, what must be opened.
_WIDE = frozenset({"countertop", "diningtable", "coffeetable", "sidetable", "desk", "dresser", "bed", "sofa"})
_CLOSED = frozenset({"cabinet", "drawer", "safe"})


class TaskWords(msgspec.Struct, frozen=True):
    """A task sentence taken apart: kind (simple, light, clean, heat, cool, two) and displayed classes."""

    kind: str
    thing: str
    place: str = ""
    lamp: str = ""


class _Belief(msgspec.Struct):
    """What the expert believes; everything is a displayed name.

    Attributes:
        task: the task.
        order: all receptacles in the order in which equally good ones are searched.
        by_prior: whether common sense about likely places comes before that order.
        admissible: the admissible commands now.
        here: receptacles at the agent's location.
        held: object in the hand, or "".
        contents: receptacle -> objects last seen in or on it; a receptacle not yet looked into is missing.
        visited: receptacles where the agent has stood.
        lamps: lamp -> receptacle at whose location it was last seen.
        lit: lamps that were turned on.
        treated: objects in the state that the task asks for.
        unsuitable: objects that cannot be treated.
        refuses: "class/receptacle" pairs: such objects cannot be put there.
    """

    task: TaskWords
    order: list[str]
    by_prior: bool = True
    admissible: list[str] = []
    here: list[str] = []
    held: str = ""
    contents: dict[str, list[str]] = {}
    visited: list[str] = []
    lamps: dict[str, str] = {}
    lit: list[str] = []
    treated: list[str] = []
    unsuitable: list[str] = []
    refuses: list[str] = []


def read_task(sentence: str) -> TaskWords:
    """Takes apart a task sentence of the official templates.

    Args:
        sentence: such as "put a hot potato in fridge", without a full stop.

    Raises:
        UsageError: if it follows none of the templates (human annotations do not).
    """
    for name, pattern in _TASKS:
        match = re.fullmatch(pattern, sentence.strip())
        if match:
            found = {key.rstrip("2"): value for key, value in match.groupdict().items() if value}
            kind = name or {"hot": "heat"}.get(found["kind"], found["kind"])
            return TaskWords(kind, found["thing"], found.get("place", ""), found.get("lamp", ""))
    raise UsageError(
        f"the scripted expert cannot read the task {sentence!r}; it needs one of ALFWorld's template sentences"
    )


def _class(name: str) -> str:
    return name.rsplit(" ", 1)[0]


def _names(listing: str) -> list[str]:
    """Names in a listing such as `a mug 1, a cup 2, and a pan 1` (articles optional)."""
    if listing == "nothing":
        return []
    return [name.removeprefix("a ") for name in re.split(r", (?:and )?", listing)]


class Expert:
    """A closed-loop expert for one agent; reset it for every episode.

    Args:
        order: "likely" searches likely places first, "random" searches every place that may hold the target in
            random order.
        rng: draws the search order at reset; None keeps the order of the room list.

    Raises:
        UsageError: for an unknown order.
    """

    def __init__(self, *, order: Order = "likely", rng: np.random.Generator | None = None) -> None:
        if order not in ("likely", "random"):
            raise choices("search order", order, ("likely", "random"))
        self._order = order
        self._rng = rng
        self._belief: _Belief | None = None

    def reset(self, observation: str, admissible: Sequence[str]) -> None:
        """Begins an episode.

        Args:
            observation: the first observation, with the task sentence.
            admissible: the admissible commands.

        Raises:
            UsageError: if the observation states no task at all. A task that the expert cannot read is an error only
                when it is asked for an action.
        """
        _, found, sentence = observation.rpartition(TASK_PREFIX)
        if not found:
            raise UsageError(f"the first observation states no task (it lacks {TASK_PREFIX!r})")
        sentence = sentence.strip().removesuffix(".")
        try:
            task = read_task(sentence)
        except UsageError:
            task = TaskWords(_UNREADABLE, sentence)
        places = [command.removeprefix("go to ") for command in admissible if command.startswith("go to ")]
        facing = _FACING.search(observation)
        places += _names(facing[1]) if facing else []
        if self._rng is not None:
            places = [places[i] for i in self._rng.permutation(len(places))]
        self._belief = _Belief(task, places, self._order == "likely")
        self.observe("", "", admissible)

    def observe(self, action: str, observation: str, admissible: Sequence[str]) -> None:
        """Takes note of a turn, whoever chose the action.

        Args:
            action: the command that was sent.
            observation: the text that came back.
            admissible: the commands admissible after it.
        """
        belief = self._beliefs()
        _note_place(belief, admissible)
        if belief.task.lamp:
            _note_lamps(belief)
        if action:
            _note_text(belief, observation)
        _note_within_reach(belief)
        if not belief.held and _next_target(belief) is None and len(belief.contents) == len(belief.order):
            # Everything was looked into and it is nowhere: something was moved meanwhile. Look again.
            belief.contents = {r: found for r, found in belief.contents.items() if r in belief.here}

    def next_action(self) -> str:
        """The next command towards the goal; always an admissible one.

        Raises:
            UsageError: if the task follows none of the templates.
        """
        belief = self._beliefs()
        if belief.task.kind == _UNREADABLE:
            read_task(belief.task.thing)
        command = _decide(belief)
        return command if command in belief.admissible else "look"

    def to_state(self) -> dict[str, Any]:
        """Everything it believes, as JSON-able values."""
        state: dict[str, Any] = msgspec.to_builtins(self._beliefs())
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Expert:
        """An expert that believes what `to_state` gave.

        Raises:
            UsageError: if that is no such state.
        """
        try:
            belief = msgspec.convert(state, _Belief)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"this is no state of the ALFWorld expert ({error}); take it from Expert.to_state"
            ) from error
        expert = cls(order="likely" if belief.by_prior else "random")
        expert._belief = belief
        return expert

    def _beliefs(self) -> _Belief:
        if self._belief is None:
            raise UsageError("the expert was not told how the episode began; call reset first")
        return self._belief


# -- taking note ------------------------------------------------------------------------------------------------


def _note_place(belief: _Belief, admissible: Sequence[str]) -> None:
    belief.admissible = list(admissible)
    known = set(belief.order)
    examined = [command.removeprefix("examine ") for command in admissible if command.startswith("examine ")]
    belief.here = [name for name in examined if name in known]
    belief.held = next((name for name in examined if name not in known), "")
    belief.visited += [name for name in belief.here if name not in belief.visited]


def _note_lamps(belief: _Belief) -> None:
    """A lamp within reach shows as a `use` command."""
    used = [command.removeprefix("use ") for command in belief.admissible if command.startswith("use ")]
    belief.lamps = {lamp: place for lamp, place in belief.lamps.items() if place not in belief.here}
    belief.lamps |= {lamp: belief.here[0] for lamp in used if _class(lamp) == belief.task.lamp}
    if not belief.lamps and len(belief.visited) == len(belief.order):
        belief.visited = list(belief.here)


def _note_text(belief: _Belief, observation: str) -> None:
    for match in _CONTENTS.finditer(observation):
        if (match[1] or match[2]) in belief.order:
            belief.contents[match[1] or match[2]] = _names(match[3])
    if taken := _TAKEN.match(observation):
        found = belief.contents.get(taken[2], [])
        belief.contents[taken[2]] = [name for name in found if name != taken[1]]
    elif placed := _PLACED.match(observation):
        belief.contents.setdefault(placed[3], []).append(placed[1] or placed[2])
    elif treated := _TREATED.match(observation):
        verb, thing = treated[1], treated[2]
        if verb == belief.task.kind and thing not in belief.treated:
            belief.treated.append(thing)
        elif _UNDONE_BY.get(verb) == belief.task.kind and thing in belief.treated:
            belief.treated.remove(thing)
    elif (lit := _LIT.match(observation)) and lit[1] not in belief.lit:
        belief.lit.append(lit[1])


def _note_within_reach(belief: _Belief) -> None:
    """What the admissible commands say about the receptacles here."""
    allowed = set(belief.admissible)
    for place in belief.here:
        if f"open {place}" in allowed:
            continue
        if not belief.held:
            belief.contents[place] = [
                command.removeprefix("take ").removesuffix(f" from {place}")
                for command in belief.admissible
                if command.startswith("take ") and command.endswith(f" from {place}")
            ]
            continue
        kind = f"{_class(belief.held)}/{place}"
        if _putting(belief, place) is None and kind not in belief.refuses:
            belief.refuses.append(kind)
        if belief.held not in belief.unsuitable and _untreatable(belief, place):
            belief.unsuitable.append(belief.held)


def _untreatable(belief: _Belief, place: str) -> bool:
    """Whether the held target stands before its open appliance and still cannot be treated."""
    verb = belief.task.kind
    return (
        _class(belief.held) == belief.task.thing
        and APPLIANCES.get(verb) == _class(place)
        and f"{verb} {belief.held} with {place}" not in belief.admissible
    )


# -- deciding ---------------------------------------------------------------------------------------------------


def _decide(belief: _Belief) -> str:
    task = belief.task
    if not belief.held:
        target = _next_target(belief)
        if target is None:
            return _search(belief)
        thing, place = target
        return _at(belief, place, f"take {thing} from {place}")
    if _class(belief.held) != task.thing or belief.held in belief.unsuitable:
        return _put_down(belief)
    if task.kind == "light":
        return _to_lamp(belief)
    if task.kind in APPLIANCES and belief.held not in belief.treated:
        appliances = [name for name in belief.order if _class(name) == APPLIANCES[task.kind]]
        if appliances:
            appliance = _nearest(belief, appliances)
            return _at(belief, appliance, f"{task.kind} {belief.held} with {appliance}")
    places = [place for place in _destinations(belief) if f"{task.thing}/{place}" not in belief.refuses]
    if not places:
        return _put_down(belief)
    shared = _half_done(belief)
    return _bring(belief, shared if shared in places else _nearest(belief, places))


def _at(belief: _Belief, place: str, command: str) -> str:
    """The command if it is possible, else the step towards it: open what is closed here, or go there."""
    if command in belief.admissible:
        return command
    if place in belief.here:
        return f"open {place}"
    return f"go to {place}"


def _putting(belief: _Belief, place: str) -> str | None:
    """The command that puts the held object there, in the game's wording, if it is possible."""
    forms = (f"move {belief.held} to {place}", f"put {belief.held} in/on {place}")
    return next((form for form in forms if form in belief.admissible), None)


def _bring(belief: _Belief, place: str) -> str:
    return _putting(belief, place) or _at(belief, place, "")


def _nearest(belief: _Belief, places: Sequence[str]) -> str:
    """One that is here, else one that was already looked into (so it is open), else the first."""
    return min(places, key=lambda place: (place not in belief.here, place not in belief.contents))


def _destinations(belief: _Belief) -> list[str]:
    return [place for place in belief.order if _class(place) == belief.task.place]


def _half_done(belief: _Belief) -> str:
    """For two objects: the destination where most of them already are; "" if none is."""
    if belief.task.kind != "two":
        return ""
    filled = {
        place: sum(_class(name) == belief.task.thing for name in belief.contents.get(place, ()))
        for place in _destinations(belief)
        if f"{belief.task.thing}/{place}" not in belief.refuses
    }
    best = max(filled, key=lambda place: filled[place], default="")
    return best if best and filled[best] else ""


def _next_target(belief: _Belief) -> tuple[str, str] | None:
    """The object to take next and where it is, among those seen; None if one has to be found first."""
    task = belief.task
    done = (
        {_half_done(belief)} if task.kind == "two" else set(_destinations(belief)) if task.kind == "simple" else set()
    )
    seen = [
        (name, place)
        for place, names in belief.contents.items()
        if place not in done
        for name in names
        if _class(name) == task.thing and name not in belief.unsuitable
    ]
    return min(
        seen,
        key=lambda pair: (pair[1] not in belief.here, pair[0] not in belief.treated),
        default=None,
    )


def _search(belief: _Belief) -> str:
    unknown = _sorted(belief, (place for place in belief.order if place not in belief.contents), belief.task.thing)
    likely = PLACES_OF.get(belief.task.thing)
    for place in unknown:
        if place in belief.here and (likely is None or _class(place) in likely):
            return f"open {place}"
    if not unknown:
        return "look"
    return _at(belief, unknown[0], f"open {unknown[0]}")


def _sorted(belief: _Belief, places: Iterable[str], thing: str) -> list[str]:
    """Where to look first for a thing."""
    likely = PLACES_OF.get(thing, frozenset())

    def rank(place: str) -> tuple[bool, int]:
        kind = _class(place)
        effort = 0 if kind in _WIDE else 2 if kind in _CLOSED else 1
        return bool(likely) and kind not in likely, effort if belief.by_prior else 0

    return sorted(places, key=rank)


def _to_lamp(belief: _Belief) -> str:
    known = {lamp: place for lamp, place in belief.lamps.items() if lamp != belief.held}
    if known:
        lamp = min(known, key=lambda name: (known[name] not in belief.here, name not in belief.lit))
        return _at(belief, known[lamp], f"use {lamp}")
    unseen = _sorted(belief, (place for place in belief.order if place not in belief.visited), belief.task.lamp)
    return f"go to {unseen[0]}" if unseen else "look"


def _put_down(belief: _Belief) -> str:
    """Gets rid of what is in the hand at the nearest place that takes it."""
    for place in belief.here:
        command = _putting(belief, place)
        if command:
            return command
    kind = _class(belief.held)
    willing = [place for place in belief.order if f"{kind}/{place}" not in belief.refuses]
    for place in willing:
        if place in belief.here and _class(place) in PLACES_OF.get(kind, ()):
            return f"open {place}"
    willing = [place for place in willing if place not in belief.here] or belief.order
    return f"go to {_sorted(belief, willing, kind)[0]}"
