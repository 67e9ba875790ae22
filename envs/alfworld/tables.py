"""Compiles an ALFWorld problem into the integer tables that the engine works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.envs.alfworld.goal import Goal
from agentgym.envs.alfworld.pddl import USE_REFERENCE, Problem
from agentgym.envs.alfworld.wording import listing
from agentgym.errors import DataError


@dataclass(frozen=True, slots=True)
class State:
    """A state of a game as numbers; as a field of `Game`, the initial one.

    Attributes:
        location: index of the agent's location.
        held: index of the held object, or -1.
        opened: bit set of the open receptacles.
        hot, cool, clean, sliced, toggled: bit sets of objects.
        contents: for each receptacle, the bit set of the objects in or on it.
        objects_at: for each location, the bit set of the objects there.
    """

    location: int
    held: int
    opened: int
    hot: int
    cool: int
    clean: int
    sliced: int
    toggled: int
    contents: tuple[int, ...]
    objects_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What never changes about the objects, as bit sets.

    Attributes:
        pickupable, cleanable, heatable, coolable, toggleable, sliceable: what can be done to an object.
        knives: objects that slice.
        holders: objects that can hold others (bowls, pots, ..).
    """

    pickupable: int
    cleanable: int
    heatable: int
    coolable: int
    toggleable: int
    sliceable: int
    knives: int
    holders: int


def _bits(indices: Iterable[int]) -> int:
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


def compile_tables(
    problem: Problem, goal: Goal, entities: list[str], names: dict[str, str], path: str
) -> dict[str, Any]:
    """The fields of `agentgym.envs.alfworld.game.Game` that follow from the problem.

    Args:
        problem: the problem.
        goal: its goal.
        entities: everything that occurs in its facts, sorted.
        names: entity -> name shown to the player.
        path: where it comes from, for error messages.

    Raises:
        DataError: if the initial state is one that the engine has no rules for.
    """
    kinds: dict[str, list[str]] = {"object": [], "receptacle": [], "location": [], "agent": []}
    for entity in entities:
        kinds.get(problem.objects[entity], []).append(entity)
    objects, receptacles, locations = ({e: i for i, e in enumerate(kinds[k])} for k in list(kinds)[:3])
    facts: dict[str, list[tuple[str, ...]]] = {}
    for fact in problem.facts:
        facts.setdefault(fact[0], []).append(fact[1:])

    def only(predicate: str, what: str) -> tuple[str, ...]:
        found = facts.get(predicate, [])
        if len(found) != 1:
            raise DataError(path, f"there should be one {what}, not {len(found)}", USE_REFERENCE)
        return found[0]

    def objects_that(predicate: str) -> int:
        return _bits(objects[arguments[0]] for arguments in facts.get(predicate, []))

    start = only("atlocation", "location of one agent")[1]
    held = -1
    if "holds" in facts or "holdsany" in facts:
        held = objects[only("holds", "held object")[1]]
        only("holdsany", "agent with an object in its hand")

    receptacle_location = [-1] * len(receptacles)
    for receptacle, location in facts.get("receptacleatlocation", []):
        if receptacle_location[receptacles[receptacle]] != -1:
            raise DataError(path, f"{receptacle} is at two locations", USE_REFERENCE)
        receptacle_location[receptacles[receptacle]] = locations[location]
    receptacles_at = tuple(
        tuple(r for r, at in enumerate(receptacle_location) if at == location) for location in locations.values()
    )

    contents = [0] * len(receptacles)
    for thing, receptacle in facts.get("inreceptacle", []):
        contents[receptacles[receptacle]] |= 1 << objects[thing]
    objects_at = [0] * len(locations)
    for thing, location in facts.get("objectatlocation", []):
        objects_at[locations[location]] |= 1 << objects[thing]

    of_type: dict[str, int] = {}  # type -> bit set, of objects and of receptacles (types are declared apart)
    object_types, receptacle_types = [""] * len(objects), [""] * len(receptacles)
    for predicate, index, shown in (
        ("objecttype", objects, object_types),
        ("receptacletype", receptacles, receptacle_types),
    ):
        for thing, type_name in facts.get(predicate, []):
            of_type[type_name] = of_type.get(type_name, 0) | 1 << index[thing]
            shown[index[thing]] = shown[index[thing]] or type_name.removesuffix("type")
    accepts = [0] * len(receptacles)
    for receptacle_type, object_type in facts.get("cancontain", []):
        for r in range(len(receptacles)):
            if of_type.get(receptacle_type, 0) >> r & 1:
                accepts[r] |= of_type.get(object_type, 0)
    shared_accepts = []
    for r, at in enumerate(receptacle_location):
        mask = 0
        for other in receptacles_at[at] if at >= 0 else ():
            mask |= accepts[other] if other != r else 0
        shared_accepts.append(mask)

    object_names = tuple(names[entity] for entity in objects)
    receptacle_names = tuple(names[entity] for entity in receptacles)
    inner: dict[int, list[int]] = {objects[arguments[0]]: [] for arguments in facts.get("isreceptacleobject", [])}
    for thing, holder in facts.get("inreceptacleobject", []):
        inner.setdefault(objects[holder], []).append(objects[thing])
    abilities = Abilities(
        **{
            ability: objects_that(ability)
            for ability in ("pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable")
        },
        knives=of_type.get("knifetype", 0) | of_type.get("butterknifetype", 0),
        holders=objects_that("isreceptacleobject"),
    )
    goal_objects = of_type.get(goal.object_type + "type", 0)
    for ability in goal.abilities:
        goal_objects &= objects_that(ability)
    goal_targets = of_type.get(goal.receptacle_type + "type", 0) if goal.receptacle_type else 0
    go_to = {f"go to {receptacle_names[r]}": r for r, location in enumerate(receptacle_location) if location >= 0}
    tables: dict[str, Any] = {
        "object_names": object_names,
        "receptacle_names": receptacle_names,
        "location_names": tuple(names[entity] for entity in locations),
        "object_types": tuple(object_types),
        "receptacle_types": tuple(receptacle_types),
        "initial": State(
            location=locations[start],
            held=held,
            opened=_bits(receptacles[arguments[0]] for arguments in facts.get("opened", [])),
            hot=objects_that("ishot"),
            cool=objects_that("iscool"),
            clean=objects_that("isclean"),
            sliced=objects_that("issliced"),
            toggled=objects_that("istoggled"),
            contents=tuple(contents),
            objects_at=tuple(objects_at),
        ),
        "abilities": abilities,
        "receptacle_location": tuple(receptacle_location),
        "receptacles_at": receptacles_at,
        "openable": _bits(receptacles[arguments[0]] for arguments in facts.get("openable", [])),
        "sinks": of_type.get("sinkbasintype", 0),
        "microwaves": of_type.get("microwavetype", 0),
        "fridges": of_type.get("fridgetype", 0),
        "accepts": tuple(accepts),
        "shared_accepts": tuple(shared_accepts),
        "goal_objects": goal_objects,
        "goal_lamps": of_type.get(goal.toggle_type + "type", 0) & abilities.toggleable if goal.toggle_type else 0,
        "goal_receptacles": tuple(r for r in range(len(receptacles)) if goal_targets >> r & 1),
        "go_to": go_to,
        "go_to_from": tuple(
            tuple(sorted(command for command, r in go_to.items() if receptacle_location[r] != location))
            for location in locations.values()
        ),
        "holder_texts": {
            holder: f"This is a normal {object_names[holder]}. In it, you see "
            + listing([f"a {object_names[thing]}" for thing in sorted(things)])
            + "."
            for holder, things in inner.items()
            if abilities.holders >> holder & 1
        },
        "object_index": {shown: index for index, shown in enumerate(object_names)},
        "receptacle_index": {shown: index for index, shown in enumerate(receptacle_names)},
    }
    tables["goal_reachable"] = _goal_reachable(tables, goal)
    return tables


def _goal_reachable(tables: Mapping[str, Any], goal: Goal) -> bool:
    """Whether the goal can be reached if nothing ever became false and no precondition asked for falsehood."""
    initial: State = tables["initial"]
    able: Abilities = tables["abilities"]
    located = [r for r, location in enumerate(tables["receptacle_location"]) if location >= 0]
    visited = [initial.location, *(tables["receptacle_location"][r] for r in located)]
    holdable = 1 << initial.held if initial.held >= 0 else 0
    for r in located:
        holdable |= initial.contents[r] & able.pickupable
    contents = list(initial.contents)
    here = 0  # objects that can be somewhere the agent can be
    for location in visited:
        here |= initial.objects_at[location]
    for r in located:
        contents[r] |= tables["accepts"][r] & holdable
        here |= tables["accepts"][r] & holdable
    within_reach = 0
    for r in located:
        within_reach |= contents[r]

    def through(appliance: int, mask: int) -> int:
        return mask & holdable if any(appliance >> r & 1 for r in located) else 0

    states = {
        "clean": initial.clean | through(tables["sinks"], able.cleanable),
        "hot": initial.hot | through(tables["microwaves"], able.heatable),
        "cool": initial.cool | through(tables["fridges"], able.coolable),
        "sliced": initial.sliced | (able.sliceable & here if able.knives & holdable else 0),
    }
    if goal.toggle_type:
        toggled = initial.toggled | (able.toggleable & within_reach)
        return bool(tables["goal_objects"] & holdable and tables["goal_lamps"] & toggled & within_reach)
    targets: int = tables["goal_objects"]
    for state in goal.states:
        targets &= states[state]
    return any(contents[r] & targets for r in tables["goal_receptacles"])
