"""The two text grammars of ALFWorld: recognising them in a game file, and the texts both have in common.

Each game carries its own grammar. Up to alfworld 0.3.5 it says `put X in/on Y` and `You arrive at loc 12.`; since
0.4.0 it says `move X to Y`, names the receptacle on arrival and knows `help`. The engine implements these two and
checks that a game's grammar is one of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from agentgym.envs.alfworld.pddl import PREDICATES, REPAIR, USE_REFERENCE
from agentgym.errors import DataError

Grammar = Literal["move", "put"]

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
TASK_PREFIX = "Your task is to: "
NOTHING_HAPPENS = "Nothing happens."
MIDDLE_OF_ROOM = "You are in the middle of a room. Looking quickly around you, you see "

_HELP_ROWS = (
    ("look:", "look around your current location"),
    ("inventory:", "check your current inventory"),
    ("go to (receptacle):", "move to a receptacle"),
    ("open (receptacle):", "open a receptacle"),
    ("close (receptacle):", "close a receptacle"),
    ("take (object) from (receptacle):", "take an object from a receptacle"),
    ("move (object) to (receptacle):", "place an object in or on a receptacle"),
    ("examine (something):", "examine a receptacle or an object"),
    ("use (object):", "use an object"),
    ("heat (object) with (receptacle):", "heat an object using a receptacle"),
    ("clean (object) with (receptacle):", "clean an object using a receptacle"),
    ("cool (object) with (receptacle):", "cool an object using a receptacle"),
    ("slice (object) with (object):", "slice an object using a sharp object"),
)
# The reference aligns the descriptions except in the `move` row, which was edited later.
HELP = "Available commands:\n" + "".join(
    f"  {form}{'  ' if form.startswith('move') else ' ' * (34 - len(form))}{use}\n" for form, use in _HELP_ROWS
)

_ACTIONS = (
    "look",
    "inventory",
    "examinereceptacle",
    "examineobject",
    "gotolocation",
    "openobject",
    "closeobject",
    "pickupobject",
    "putobject",
    "cleanobject",
    "heatobject",
    "coolobject",
    "toggleobject",
    "sliceobject",
)

_SHARED_TEXTS = (
    r"-= Welcome to TextWorld, ALFRED! =-\n\n#look.feedback#\n\n#task#",
    "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]",
    "You open the {r.name}. #examineReceptacle.feedback#",
    "You close the {r.name}.",
    "take {o} from {r}",
    "You pick up the {o.name} from the {r.name}.",
    "You are carrying: [{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}].",
    "You are not carrying anything.",
    "The {r.name} is open. In it, you see [",
    "The {r.name} is closed.",
    "On the {r.name}, you see [",
    "This is a normal {o.name}. In it, you see [",
    "This is a hot and clean sliced {o.name}.",
    "This is a cool and clean sliced {o.name}.",
    "This is a cold {o.name}.",
    "This {o.name} is on.",
    "There's nothing special about {o.name}.",
    "You turn on the {o.name}.",
    "heat {o} with {r}",
    "You heat the {o.name} using the {r.name}.",
    "You clean the {o.name} using the {r.name}.",
    "You cool the {o.name} using the {r.name}.",
    "slice {co} with {ko}",
    "You sliced the {co.name} with the {ko.name}.",
    "Next to it, you see #list_objects_on_the_floor#.",
    MIDDLE_OF_ROOM + "#list_appliances#.",
    "You are facing the [",
    '"rhs": ", and "',
)
_OWN_TEXTS: dict[Grammar, tuple[str, ...]] = {
    "move": (
        "You arrive at {r.name}. #examineReceptacle.feedback#",
        "move {o} to {r}",
        "You move the {o.name} to the {r.name}.",
        "action help {",
    ),
    "put": (
        "You arrive at {lend.name}. #examineReceptacle.feedback#",
        "put {o} in/on {r}",
        "You put the {o.name} in/on the {r.name}.",
    ),
}

_SIGNS = (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ","))

_JSON_STRING = r'("(?:[^"\\]|\\.)*")'
_TASK = re.compile(r'"task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*' + _JSON_STRING)
_HELP = re.compile(r'"help\.feedback"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*' + _JSON_STRING)


@dataclass(frozen=True, slots=True)
class Wording:
    """What a game's grammar text says.

    Attributes:
        grammar: which of the two grammars it is.
        task_line: the sentence with the task, as the first observation shows it.
        help_text: feedback of `help` (the reference's own text where the grammar has no such action).
    """

    grammar: Grammar
    task_line: str
    help_text: str


def read_wording(text: str, path: str) -> Wording:
    """Recognises the grammar of a game.

    Args:
        text: the game's `grammar`.
        path: where it comes from, for error messages.

    Raises:
        DataError: if it is neither of the two grammars, or states no task.
    """
    found = _TASK.search(text)
    if found is None:
        raise DataError(path, 'the grammar has no "task" rule', REPAIR)
    try:
        task_line = str(json.loads(found.group(1), strict=False))
    except ValueError as error:
        raise DataError(path, f"the task rule of the grammar is malformed ({error})", REPAIR) from error
    if not task_line.startswith(TASK_PREFIX):
        raise DataError(path, f"the task rule of the grammar does not begin with {TASK_PREFIX!r}", USE_REFERENCE)
    recognised = _recognise(text[: found.start(1)] + text[found.end(1) :])
    if isinstance(recognised, str):
        raise DataError(path, recognised, USE_REFERENCE)
    return Wording(recognised[0], task_line, recognised[1])


@lru_cache(maxsize=8)  # one text for thousands of games, once the task is cut out
def _recognise(text: str) -> tuple[Grammar, str] | str:
    """The variant and its help text, or what is wrong."""
    missing = next((part for part in _SHARED_TEXTS if part not in text), None)
    if missing is not None:
        return f"the text grammar lacks {missing!r}"
    variants = [name for name, texts in _OWN_TEXTS.items() if all(part in text for part in texts)]
    found = _HELP.search(text)
    if len(variants) != 1 or (found is not None) != (variants == ["move"]):
        return "the text grammar is neither the `move` nor the `put` wording"
    if found is None:
        return variants[0], HELP
    try:
        # The reference's template parser drops white space at the start of a text.
        return variants[0], str(json.loads(found.group(1), strict=False)).lstrip()
    except ValueError as error:
        return f"the text grammar has a malformed help text ({error})"


def check_domain(text: str, path: str) -> None:
    """Checks that a game's domain has all actions and predicates that the engine's rules are about.

    Raises:
        DataError: if one is missing.
    """
    missing = _missing_from_domain(text)
    if missing is not None:
        raise DataError(path, f"the PDDL domain lacks the {missing}", USE_REFERENCE)


@lru_cache(maxsize=8)
def _missing_from_domain(text: str) -> str | None:
    lowered = re.sub(r";[^\n]*", "", text).lower()
    declared = lowered.partition("(:predicates")[2].partition("(:functions")[0]
    actions = set(re.findall(r"\(:action\s+(\S+)", lowered))
    predicates = set(re.findall(r"\(\s*([a-z]+)[\s)]", declared))
    for kind, needed, given in (("action", _ACTIONS, actions), ("predicate", PREDICATES, predicates)):
        for name in needed:
            if name not in given:
                return f"{kind} {name}"
    return None


def listing(items: list[str]) -> str:
    """`nothing`, `x`, `x, and y` or `x, y, and z`."""
    if len(items) < 2:
        return items[0] if items else "nothing"
    return ", ".join(items[:-1]) + ", and " + items[-1]


def display_names(identifiers: list[str]) -> dict[str, str]:
    """Names shown to the player.

    The class of a thing is its identifier up to the first `_bar_`, with "basin" appended if the identifier has
    that word anywhere. Numbers within a class count down from its size.

    Args:
        identifiers: lower-cased identifiers of all entities, in the order in which numbers are handed out.

    Returns:
        identifier -> name. One without `_bar_` has no number but, as in the reference, a space at its end.
    """
    classes: dict[str, str] = {}
    left: dict[str, int] = {}
    for identifier in identifiers:
        head, bar, _ = identifier.partition("_bar_")
        if bar:
            head += "basin" if "basin" in identifier else ""
            classes[identifier] = head
            left[head] = left.get(head, 0) + 1
    names: dict[str, str] = {}
    for identifier in identifiers:
        if identifier in classes:
            head = classes[identifier]
            names[identifier] = f"{head} {left[head]}"
            left[head] -= 1
        else:
            text = identifier
            for word, sign in _SIGNS:
                text = text.replace(word, sign)
            names[identifier] = f"{text} "
    return names
