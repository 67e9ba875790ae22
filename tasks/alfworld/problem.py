"""The PDDL problem of a generated game, in the form of the official files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentgym.envs.alfworld.places import MAY_HOLD
from agentgym.tasks.alfworld.rooms import (
    CLEAN,
    CLEANABLE,
    CONTAINERS,
    COOL,
    COOLABLE,
    HEAT,
    HEATABLE,
    LIGHT,
    NOT_PICKABLE,
    OBJECT_TYPES,
    RECEPTACLE_TYPES,
    SLICEABLE,
    TOGGLEABLE,
    TWO,
)
from agentgym.tasks.alfworld.scenes import Receptacle, Scene

_ABILITIES = (
    ("heatable", HEATABLE),
    ("coolable", COOLABLE),
    ("cleanable", CLEANABLE),
    ("sliceable", SLICEABLE),
    ("toggleable", TOGGLEABLE),
    ("isReceptacleObject", CONTAINERS),
)
_TREATMENT = {CLEAN: ("cleanable", "isClean"), HEAT: ("heatable", "isHot"), COOL: ("coolable", "isCool")}


@dataclass(frozen=True, slots=True)
class Thing:
    """A placed object.

    Attributes:
        type: ALFRED type name.
        id: mangled identifier.
        location: where an agent can reach it.
        places: identifiers of the receptacles that it is in or on: usually one, none for what only stands in the room.
        inside: identifier of the bowl, box, .. that holds it, or "".
    """

    type: str
    id: str
    location: str
    places: tuple[str, ...]
    inside: str = ""


def goal_text(kind: str, thing: str, receptacle: str, toggle: str) -> str:
    """The goal of a task kind as PDDL; type names without their suffix."""
    if kind == LIGHT:
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
            f"(objectType ?ot {toggle}Type) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) "
            "(atLocation ?a ?l) (inReceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {thing}Type) (holds ?a ?o))))"
        )
    conditions = [f"(objectType ?o1 {thing}Type)", f"(receptacleType ?r {receptacle}Type)", "(inReceptacle ?o1 ?r)"]
    conditions += [f"({predicate} ?o1)" for predicate in _TREATMENT.get(kind, ())]
    if kind == TWO:
        conditions.append(
            f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 {thing}Type) (inReceptacle ?o2 ?r)))"
        )
    return f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {' '.join(conditions)}))))"


def problem_text(name: str, scene: Scene, things: Iterable[Thing], goal: str, *, declare_all: bool) -> str:
    """The whole problem.

    Args:
        name: name of the problem.
        scene: the room.
        things: all objects.
        goal: text of the goal.
        declare_all: declare every type, and one untyped-looking object a type, as official files do; otherwise
            only the types in use.
    """
    things = list(things)
    used_receptacles = {receptacle.type for receptacle in scene.receptacles}
    object_types = OBJECT_TYPES if declare_all else tuple(sorted({thing.type for thing in things}))
    receptacle_types = RECEPTACLE_TYPES if declare_all else tuple(sorted(used_receptacles))
    declared = ["agent1 - agent"]
    declared += [f"{name} - object" for name in object_types if declare_all]
    declared += [f"{name}Type - otype" for name in object_types]
    declared += [f"{name}Type - rtype" for name in receptacle_types]
    declared += [f"{thing.id} - object" for thing in things]
    declared += [f"{receptacle.id} - receptacle" for receptacle in scene.receptacles]
    locations = {scene.start, *(receptacle.location for receptacle in scene.receptacles)}
    declared += [f"{location} - location" for location in sorted(locations)]

    facts = [line for receptacle in scene.receptacles for line in _receptacle_facts(receptacle)]
    known = set(object_types)
    facts += [
        f"canContain {place}Type {thing}Type"
        for place in sorted(used_receptacles)
        for thing in MAY_HOLD[place]
        if thing in known
    ]
    facts += [line for thing in things for line in _thing_facts(thing)]
    facts.append(f"atLocation agent1 {scene.start}")
    indent = "\n        "
    return (
        f"(define (problem plan_{name})\n(:domain alfred)\n(:objects{indent}"
        + indent.join(declared)
        + f"{indent})\n(:init{indent}("
        + f"){indent}(".join(facts)
        + f"){indent})\n(:goal {goal})\n)\n"
    )


def _receptacle_facts(receptacle: Receptacle) -> list[str]:
    facts = [
        f"receptacleType {receptacle.id} {receptacle.type}Type",
        f"receptacleAtLocation {receptacle.id} {receptacle.location}",
    ]
    return [*facts, f"openable {receptacle.id}"] if receptacle.openable else facts


def _thing_facts(thing: Thing) -> list[str]:
    facts = [f"objectType {thing.id} {thing.type}Type", f"objectAtLocation {thing.id} {thing.location}"]
    facts += [f"inReceptacle {thing.id} {place}" for place in thing.places]
    if thing.type not in NOT_PICKABLE:
        facts.append(f"pickupable {thing.id}")
    facts += [f"{ability} {thing.id}" for ability, types in _ABILITIES if thing.type in types]
    return [*facts, f"inReceptacleObject {thing.id} {thing.inside}"] if thing.inside else facts
