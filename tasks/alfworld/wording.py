"""The PDDL domain and the text grammar that every generated game carries inside its file.

Both are written here from the rules of play, and are equal in effect to the packaged ones: the alfworld package plays
a generated game with the same observations, admissible commands and outcomes as an official game of that wording.

The grammar format (textworld's "twl2") is a list of `action` blocks, each with a command template and a feedback rule,
and of JSON rule tables. `#name#` expands a rule, `{r.name}` a parameter of the action, `[{text | query}]` a list.
"""

from __future__ import annotations

import json
from functools import lru_cache

from agentgym.envs.alfworld.pddl import PREDICATES
from agentgym.envs.alfworld.wording import HELP, MIDDLE_OF_ROOM, TASK_PREFIX, WELCOME, Grammar

Rules = dict[str, list[dict[str, str]]]

_HERE = "(atLocation ?a ?l) (receptacleAtLocation ?r ?l)"
_ACCESSIBLE = "(or (not (openable ?r)) (opened ?r))"
_PARAMETERS = {"a": "agent", "l": "location", "o": "object", "r": "receptacle"}

# name: (parameters, precondition, effect, cost). Every action must have an effect, else the translator drops it.
_ACTIONS: dict[str, tuple[str, str, str, int]] = {
    "look": ("?a ?l", "(atLocation ?a ?l)", "(checked ?l)", 0),
    "inventory": ("?a", "", "(checked ?a)", 0),
    "examineReceptacle": (
        "?a ?r",
        "(exists (?l - location) (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l)))",
        "(checked ?r)",
        0,
    ),
    "examineObject": ("?a ?o", "(holds ?a ?o)", "(checked ?o)", 0),
    "GotoLocation": (
        "?a ?lStart ?lEnd ?r",
        "(atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd)",
        "(not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd)",
        1,
    ),
    "OpenObject": ("?a ?l ?r", f"(openable ?r) {_HERE} (not (opened ?r))", "(opened ?r) (checked ?r)", 1),
    "CloseObject": ("?a ?l ?r", f"(openable ?r) {_HERE} (opened ?r)", "(not (opened ?r))", 1),
    "PickupObject": (
        "?a ?l ?o ?r",
        f"(pickupable ?o) {_HERE} (inReceptacle ?o ?r) (not (holdsAny ?a)) {_ACCESSIBLE}",
        "(not (inReceptacle ?o ?r)) (holds ?a ?o) (holdsAny ?a) (not (objectAtLocation ?o ?l))",
        1,
    ),
    "PutObject": (
        "?a ?l ?o ?r ?ot ?rt",
        f"(holds ?a ?o) {_HERE} {_ACCESSIBLE} (objectType ?o ?ot) (receptacleType ?r ?rt) (canContain ?rt ?ot)",
        "(inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) (not (holdsAny ?a))",
        1,
    ),
    "CleanObject": (
        "?a ?l ?r ?o",
        f"(cleanable ?o) (receptacleType ?r SinkBasinType) {_HERE} (holds ?a ?o)",
        "(isClean ?o)",
        5,
    ),
    "HeatObject": (
        "?a ?l ?r ?o",
        f"(heatable ?o) (receptacleType ?r MicrowaveType) {_HERE} (holds ?a ?o)",
        "(isHot ?o) (not (isCool ?o))",
        5,
    ),
    "CoolObject": (
        "?a ?l ?r ?o",
        f"(coolable ?o) (receptacleType ?r FridgeType) {_HERE} (holds ?a ?o)",
        "(isCool ?o) (not (isHot ?o))",
        5,
    ),
    "ToggleObject": (
        "?a ?l ?o ?r",
        f"(toggleable ?o) {_HERE} (inReceptacle ?o ?r)",
        "(when (isOn ?o) (not (isOn ?o))) (when (not (isOn ?o)) (isOn ?o)) (isToggled ?o)",
        5,
    ),
    "SliceObject": (
        "?a ?l ?co ?ko",
        "(sliceable ?co) (or (objectType ?ko KnifeType) (objectType ?ko ButterKnifeType)) (atLocation ?a ?l) "
        "(objectAtLocation ?co ?l) (holds ?a ?ko)",
        "(isSliced ?co)",
        5,
    ),
    "help": ("?a", "", "(checked ?a)", 0),
}
_VARIABLE_TYPES = {
    "?lStart": "location", "?lEnd": "location", "?ot": "otype", "?rt": "rtype", "?co": "object", "?ko": "object",
}  # fmt: skip


def _typed(variables: str) -> str:
    return " ".join(f"{name} - {_VARIABLE_TYPES.get(name) or _PARAMETERS[name[1]]}" for name in variables.split())


@lru_cache(maxsize=2)
def domain_text(grammar: Grammar = "move") -> str:
    """The PDDL domain; the "put" wording has no `help` action."""
    lines = ["(define (domain alfred)", "  (:requirements :adl :action-costs :typing)"]
    lines += ["  (:types agent location receptacle object rtype otype)", "  (:predicates"]
    for name, types in PREDICATES.items():
        arguments = "".join(f" ?x{i}{f' - {kind}' if kind else ''}" for i, kind in enumerate(types))
        lines.append(f"    ({name}{arguments})")
    lines += ["  )", "  (:functions (distance ?from ?to) (total-cost) - number)"]
    for name, (variables, precondition, effect, cost) in _ACTIONS.items():
        if name == "help" and grammar == "put":
            continue
        charge = f" (increase (total-cost) {cost})" if cost else ""
        lines += [f"  (:action {name}", f"    :parameters ({_typed(variables)})"]
        lines += [f"    :precondition {f'(and {precondition})' if precondition else '()'}"]
        lines += [f"    :effect (and {effect}{charge}))"]
    return "\n".join([*lines, ")", ""])


def _rule(name: str, *alternatives: str | tuple[str, str]) -> Rules:
    """One rule: alternatives in order, each a text or a (condition, text)."""
    return {
        name: [
            {"rhs": item} if isinstance(item, str) else {"condition": item[0], "rhs": item[1]} for item in alternatives
        ]
    }


def _listing(query: str, variable: str = "o") -> str:
    return f"[{{{variable}.indefinite + ' ' + {variable}.name | {query}}}]"


def _examine_object() -> Rules:
    states = (
        ("isclean(o:object) & ishot(o:object)", "hot and clean "),
        ("isclean(o:object) & iscool(o:object)", "cool and clean "),
        ("isclean(o:object)", "clean "),
        ("ishot(o:object)", "hot "),
    )
    inside = _listing("inreceptacleobject(o2:object, o:object)", "o2")
    sliced = [*states, ("iscool(o:object)", "cool ")]
    whole = [*states, ("iscool(o:object)", "cold ")]
    return _rule(
        "examineObject.feedback",
        ("isreceptacleobject(o:object)", f"This is a normal {{o.name}}. In it, you see {inside}."),
        *((f"{query} & issliced(o:object)", f"This is a {state}sliced {{o.name}}.") for query, state in sliced),
        *((query, f"This is a {state}{{o.name}}.") for query, state in whole),
        ("toggleable(o:object) & istoggled(o:object)", "This {o.name} is on."),
        ("sliceable(o:object) & issliced(o:object)", "This is a sliced {o.name}."),
        "There's nothing special about {o.name}.",
    )


def _shared_rules(task: str) -> Rules:
    contents = _listing("inreceptacle(o:object, r:receptacle)")
    here = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
    # Only facts that were deleted during play have an explicit negation, so this lists what was once taken from r.
    # The order of the conditions is the order of the listing: by object first.
    left_over = (
        "atlocation(a:agent, l:location) & objectatlocation(o:object, l:location) & "
        "receptacleatlocation(r:receptacle, l:location) & not_inreceptacle(o:object, r:receptacle)"
    )
    receptacles = "receptacleatlocation(r:receptacle, l:location)"
    return {
        **_rule("intro", f"{WELCOME}\n\n#look.feedback#\n\n#task#"),
        **_rule("task", f"{TASK_PREFIX}{task}."),
        **_rule(
            "look.feedback",
            (here, "#facing#. Next to it, you see #list_objects_on_the_floor#."),
            f"{MIDDLE_OF_ROOM}#list_appliances#.",
        ),
        **_rule("facing", f"You are facing the [{{r.name | {here}}}]"),
        **_rule("list_objects_on_the_floor", (left_over, _listing(left_over)), "nothing"),
        **_rule("list_appliances", (receptacles, _listing(receptacles, "r")), "nothing"),
        **_rule(
            "examineReceptacle.feedback",
            (
                "openable(r:receptacle) & opened(r:receptacle)",
                f"The {{r.name}} is open. In it, you see {contents}.",
            ),
            ("openable(r:receptacle)", "The {r.name} is closed."),
            f"On the {{r.name}}, you see {contents}.",
        ),
        **_examine_object(),
        **_rule(
            "inventory.feedback",
            ("holdsany(a:agent)", f"You are carrying: {_listing('holds(a:agent, o:object)')}."),
            "You are not carrying anything.",
        ),
        **_rule("list_empty", "nothing"),
        **_rule("list_separator", ", "),
        **_rule("list_last_separator", ", and "),
    }


def _commands(grammar: Grammar) -> dict[str, tuple[str, str]]:
    """Action -> (command template, feedback text or "" where a shared rule of that name gives it)."""
    put = (
        ("move {o} to {r}", "You move the {o.name} to the {r.name}.")
        if grammar == "move"
        else ("put {o} in/on {r}", "You put the {o.name} in/on the {r.name}.")
    )
    arrival = "r" if grammar == "move" else "lend"
    commands = {
        "GotoLocation": (
            "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]",
            f"You arrive at {{{arrival}.name}}. #examineReceptacle.feedback#",
        ),
        "OpenObject": ("open {r}", "You open the {r.name}. #examineReceptacle.feedback#"),
        "CloseObject": ("close {r}", "You close the {r.name}."),
        "PickupObject": ("take {o} from {r}", "You pick up the {o.name} from the {r.name}."),
        "PutObject": put,
        "inventory": ("inventory", ""),
        "look": ("look", ""),
        "examineReceptacle": ("examine {r}", ""),
        "examineObject": ("examine {o}", ""),
        "ToggleObject": ("use {o}", "You turn on the {o.name}."),
        "SliceObject": ("slice {co} with {ko}", "You sliced the {co.name} with the {ko.name}."),
    }
    for verb in ("heat", "clean", "cool"):
        commands[f"{verb.title()}Object"] = (
            f"{verb} {{o}} with {{r}}",
            f"You {verb} the {{o.name}} using the {{r.name}}.",
        )
    return commands | ({"help": ("help", HELP)} if grammar == "move" else {})


def grammar_text(task: str, grammar: Grammar = "move") -> str:
    """The text grammar of one game.

    Args:
        task: the task sentence without its full stop.
        grammar: "move" for the wording since alfworld 0.4.0, "put" for the one before.
    """
    before, after = _grammar_parts(grammar)
    return f"{before}{json.dumps(task)[1:-1]}{after}"


@lru_cache(maxsize=2)
def _grammar_parts(grammar: Grammar) -> tuple[str, str]:
    slot = "TASK SENTENCE"
    commands = _commands(grammar)
    rules = _shared_rules(slot)
    for name, (_, feedback) in commands.items():
        if feedback:
            rules |= _rule(f"{name}.feedback", feedback)
    blocks = [f'grammar :: """\n{json.dumps(rules, indent=2)}\n""";\n']
    for name, (template, _) in commands.items():
        blocks.append(f'action {name} {{\n  template :: "{template}";\n  feedback :: "#{name}.feedback#";\n}}\n')
    before, _, after = "\n".join(blocks).partition(slot)
    return before, after
