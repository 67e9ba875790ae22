"""Goals of ALFWorld games: from PDDL atoms to a structure, and whether a goal is reachable at all."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.envs.alfworld.pddl import USE_REFERENCE, Fact
from agentgym.errors import DataError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

_STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced"}
_ABILITIES = ("cleanable", "heatable", "coolable", "sliceable")
_KIND_OF_STATE = {
    "": "pick_and_place_simple",
    "clean": "pick_clean_then_place_in_recep",
    "hot": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What has to be true for the game to be won.

    Attributes:
        kind: one of `TASK_TYPES`.
        object_type: type of the target, as `potato`.
        receptacle_type: where it has to be, as `sinkbasin`; "" for look_at_obj_in_light.
        toggle_type: the lamp's type for look_at_obj_in_light, otherwise "".
        states: states that the target needs, out of clean, hot, cool and sliced.
        abilities: static properties that the target needs, out of cleanable, heatable, coolable and sliceable.
    """

    kind: str
    object_type: str
    receptacle_type: str = ""
    toggle_type: str = ""
    states: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ()


def read_goal_structure(atoms: tuple[Fact, ...], path: str) -> Goal:
    """Recognises a goal.

    Args:
        atoms: what `agentgym.envs.alfworld.pddl.read_goal` returns.
        path: where it comes from, for error messages.

    Raises:
        DataError: if it is none of the six kinds.
    """
    goal = _look_goal(atoms) or _place_goal(atoms)
    if goal is None:
        shown = " ".join(f"({' '.join(atom)})" for atom in atoms)
        raise DataError(path, f"the goal is none of the six kinds of ALFWorld: {shown:.300}", USE_REFERENCE)
    return goal


def _look_goal(atoms: tuple[Fact, ...]) -> Goal | None:
    """A toggled lamp where the agent is, and a target in its hand."""
    by_predicate = {atom[0]: atom for atom in atoms}
    if not {"istoggled", "holds", "inreceptacle", "receptacleatlocation"} <= by_predicate.keys():
        return None
    lamp = by_predicate["istoggled"][1]
    _, holder, target = by_predicate["holds"]
    receptacle = by_predicate["inreceptacle"][2]
    location = by_predicate["receptacleatlocation"][2]
    agent = next((atom[1] for atom in atoms if atom[0] == "atlocation"), "")
    lamp_type, target_type = _type_of(lamp, atoms), _type_of(target, atoms)
    expected = {
        ("objecttype", lamp, lamp_type),
        ("toggleable", lamp),
        ("istoggled", lamp),
        ("inreceptacle", lamp, receptacle),
        ("receptacleatlocation", receptacle, location),
        ("atlocation", agent, location),
        ("objecttype", target, target_type),
        ("holds", holder, target),
    }
    variables = (lamp, target, receptacle, location, agent, holder)
    if set(atoms) != expected or lamp == target or not _well_named(variables, lamp_type, target_type):
        return None
    return Goal(TASK_TYPES[1], _short(target_type), toggle_type=_short(lamp_type))


def _place_goal(atoms: tuple[Fact, ...]) -> Goal | None:
    """One object, or two different ones of one type, in one receptacle of a type."""
    placed = [atom[1] for atom in atoms if atom[0] == "inreceptacle"]
    receptacles = {atom[2] for atom in atoms if atom[0] == "inreceptacle"}
    if len(receptacles) != 1 or len(placed) not in (1, 2):
        return None
    receptacle = receptacles.pop()
    receptacle_type = _type_of(receptacle, atoms)
    object_type = _type_of(placed[0], atoms)
    conditions = [sorted(a[0] for a in atoms if a[0] in (*_STATES, *_ABILITIES) and a[1] == o) for o in placed]
    expected: set[Fact] = {("receptacletype", receptacle, receptacle_type)}
    for target, needed in zip(placed, conditions, strict=True):
        expected |= {("inreceptacle", target, receptacle), ("objecttype", target, object_type)}
        expected |= {(predicate, target) for predicate in needed}
    if len(placed) == 2:
        expected.add(("!=", *placed) if ("!=", *placed) in atoms else ("!=", *reversed(placed)))
    states = tuple(_STATES[predicate] for predicate in conditions[0] if predicate in _STATES)
    main = [state for state in states if state != "sliced"]
    if set(atoms) != expected or conditions[0] != conditions[-1] or len(set(placed)) != len(placed):
        return None
    if len(main) > 1 or (main and len(placed) == 2):
        return None
    if not _well_named((*placed, receptacle), object_type, receptacle_type):
        return None
    kind = TASK_TYPES[5] if len(placed) == 2 else _KIND_OF_STATE[main[0] if main else ""]
    abilities = tuple(predicate for predicate in conditions[0] if predicate in _ABILITIES)
    return Goal(kind, _short(object_type), _short(receptacle_type), states=states, abilities=abilities)


def _type_of(variable: str, atoms: tuple[Fact, ...]) -> str:
    """The type constant that the atoms demand of a variable, "" if there is none."""
    kinds = (a[2] for a in atoms if a[0] in ("objecttype", "receptacletype") and a[1] == variable)
    return next((kind for kind in kinds if not kind.startswith("?")), "")


def _well_named(variables: tuple[str, ...], *types: str) -> bool:
    return all(name.startswith("?") for name in variables) and all(name.endswith("type") for name in types)


def _short(type_name: str) -> str:
    return type_name.removesuffix("type")
