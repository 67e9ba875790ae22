"""Reader for the PDDL problems of ALFWorld games.

Only the part of PDDL that such problems use is understood: typed objects, positive ground facts, numeric
initial values (ignored) and a conjunctive goal with existential quantifiers. Everything is lower-cased, as the
reference translator (Fast Downward) does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count

from agentgym.errors import DataError

Tree = list["str | Tree"]
Fact = tuple[str, ...]

USE_REFERENCE = 'Play it with backend="textworld", which runs the reference packages.'
REPAIR = "Fetch or generate the game again."

TYPES = frozenset({"agent", "location", "receptacle", "object", "rtype", "otype"})

# Argument types of every predicate of the ALFWorld domain; "" accepts any type (the domain itself marks
# locations and agents as checked although it declares the argument a receptacle).
PREDICATES: dict[str, tuple[str, ...]] = {
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    "inreceptacle": ("object", "receptacle"),
    "isreceptacleobject": ("object",),
    "inreceptacleobject": ("object", "object"),
    "isreceptacleobjectfull": ("object",),
    "wasinreceptacle": ("object", "receptacle"),
    "checked": ("",),
    "examined": ("location",),
    "receptacletype": ("receptacle", "rtype"),
    "cancontain": ("rtype", "otype"),
    "objecttype": ("object", "otype"),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
    "holdsanyreceptacleobject": ("agent",),
    "full": ("receptacle",),
    "isclean": ("object",),
    "cleanable": ("object",),
    "ishot": ("object",),
    "heatable": ("object",),
    "iscool": ("object",),
    "coolable": ("object",),
    "pickupable": ("object",),
    "moveable": ("object",),
    "toggleable": ("object",),
    "ison": ("object",),
    "istoggled": ("object",),
    "sliceable": ("object",),
    "issliced": ("object",),
}

# Real problems nest seven deep; the limit keeps hostile files from exhausting the interpreter's stack.
MAX_DEPTH = 64

_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """One PDDL problem, lower-cased.

    Attributes:
        objects: declared name -> type.
        facts: (predicate, argument, ...) of every initial fact, duplicates removed, in file order.
        goal: atoms of the goal, see `read_goal`.
    """

    objects: dict[str, str]
    facts: tuple[Fact, ...]
    goal: tuple[Fact, ...]


def read_problem(text: str, path: str) -> Problem:
    """Reads a problem.

    Args:
        text: the PDDL text of one `(define (problem ..) ..)`.
        path: where it comes from, for error messages.

    Raises:
        DataError: if it is no problem, or uses PDDL beyond what ALFWorld games use.
    """
    sections: dict[str, Tree] = {}
    top = _read_tree(text, path)
    for section in top[1:]:
        if not isinstance(section, list) or not section or not isinstance(section[0], str):
            raise DataError(path, "the PDDL problem has something other than sections at its top level", REPAIR)
        if section[0] in sections:
            raise DataError(path, f"the PDDL problem has two {section[0]} sections", REPAIR)
        sections[section[0]] = section[1:]
    for key in ("problem", ":domain", ":objects", ":init", ":goal"):
        if key not in sections:
            raise DataError(path, f"the PDDL problem has no ({key} ..) section", REPAIR)
    if sections[":domain"] != ["alfred"]:
        raise DataError(path, f"the PDDL problem is for the domain {sections[':domain']}, not alfred", REPAIR)
    objects = _read_objects(sections[":objects"], path)
    return Problem(objects, _read_facts(sections[":init"], objects, path), read_goal(sections[":goal"], path))


def _read_tree(text: str, path: str) -> Tree:
    """The one s-expression of `text`."""
    root: Tree = []
    stack = [root]
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            inner: Tree = []
            stack[-1].append(inner)
            stack.append(inner)
            if len(stack) > MAX_DEPTH:
                raise DataError(path, f"the PDDL problem nests deeper than {MAX_DEPTH} parentheses", REPAIR)
        elif token == ")":
            if len(stack) == 1:
                raise DataError(path, "the PDDL problem closes more parentheses than it opens", REPAIR)
            stack.pop()
        else:
            stack[-1].append(token)
    if len(stack) != 1:
        raise DataError(path, f"the PDDL problem leaves {len(stack) - 1} parentheses open", REPAIR)
    if len(root) != 1 or not isinstance(root[0], list) or root[0][:1] != ["define"]:
        raise DataError(path, "pddl_problem is not one (define ..) expression", REPAIR)
    return root[0]


def _read_objects(tokens: Tree, path: str) -> dict[str, str]:
    """`a b - type c - type ..` as name -> type; names without a type are of type object."""
    objects: dict[str, str] = {}
    waiting: list[str] = []
    stream = iter(tokens)
    for token in stream:
        if not isinstance(token, str):
            raise DataError(path, "the :objects section has nested parentheses", USE_REFERENCE)
        if token == "-":
            kind = next(stream, None)
            if not isinstance(kind, str) or kind not in TYPES:
                raise DataError(path, f"objects are declared with the unknown type {kind!r:.80}", USE_REFERENCE)
            _declare(objects, waiting, kind, path)
            waiting = []
        else:
            waiting.append(token)
    _declare(objects, waiting, "object", path)
    return objects


def _declare(objects: dict[str, str], names: list[str], kind: str, path: str) -> None:
    for name in names:
        if objects.setdefault(name, kind) != kind:
            raise DataError(path, f"{name} is declared as {objects[name]} and as {kind}", USE_REFERENCE)


def _read_facts(items: Tree, objects: dict[str, str], path: str) -> tuple[Fact, ...]:
    facts: dict[Fact, None] = {}
    for item in items:
        if not isinstance(item, list) or not item:
            raise DataError(path, f"the initial state has {item!r:.80} where a fact should be", REPAIR)
        predicate = item[0]
        if predicate == "=":  # distances and costs have no influence on play
            continue
        types = PREDICATES.get(predicate) if isinstance(predicate, str) else None
        if types is None:
            raise DataError(path, f"the initial state has the unsupported fact {item!r:.120}", USE_REFERENCE)
        if len(item) != len(types) + 1:
            raise DataError(path, f"the fact {item!r:.120} should have {len(types)} arguments", REPAIR)
        for argument, kind in zip(item[1:], types, strict=True):
            given = objects.get(argument) if isinstance(argument, str) else None
            if given is None:
                raise DataError(path, f"the fact {item!r:.120} is about something undeclared", REPAIR)
            if kind and given != kind:
                raise DataError(
                    path, f"the fact {item!r:.120} needs a {kind}, but {argument} is a {given}", USE_REFERENCE
                )
        facts[tuple(token for token in item if isinstance(token, str))] = None
    return tuple(facts)


def read_goal(section: Tree, path: str) -> tuple[Fact, ...]:
    """Flattens a goal made of `and`, `exists`, atoms and `(not (= a b))`.

    Args:
        section: what follows `:goal`.
        path: where it comes from, for error messages.

    Returns:
        The atoms. Variables are renamed to ?0, ?1, .. so that equal names in different scopes differ; an
        inequality becomes ("!=", a, b).

    Raises:
        DataError: if the goal uses anything else.
    """
    atoms: list[Fact] = []
    fresh = count()
    todo: list[tuple[str | Tree, dict[str, str]]] = [(item, {}) for item in reversed(section)]
    while todo:
        node, scope = todo.pop()
        match node:
            case ["and", *parts]:
                todo.extend((part, scope) for part in reversed(parts))
            case ["exists", list(variables), body]:
                names = _variables(variables, path)
                todo.append((body, scope | {name: f"?{next(fresh)}" for name in names}))
            case ["not", ["=", str(left), str(right)]]:
                atoms.append(("!=", scope.get(left, left), scope.get(right, right)))
            case [str(predicate), *arguments] if predicate in PREDICATES:
                words = [word for word in arguments if isinstance(word, str)]
                if len(words) != len(arguments) or len(words) != len(PREDICATES[predicate]):
                    raise DataError(path, f"the goal has the malformed atom {node!r:.120}", USE_REFERENCE)
                atoms.append((predicate, *(scope.get(word, word) for word in words)))
            case _:
                raise DataError(path, f"the goal has the unsupported part {node!r:.120}", USE_REFERENCE)
    return tuple(atoms)


def _variables(tokens: Tree, path: str) -> list[str]:
    names: list[str] = []
    skip = False
    for token in tokens:
        if not isinstance(token, str):
            raise DataError(path, "a quantifier of the goal has nested parentheses", USE_REFERENCE)
        if skip or token == "-":
            skip = token == "-" and not skip
        else:
            names.append(token)
    return names
