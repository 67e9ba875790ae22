"""Shortest plans for ALFWorld games, with full knowledge of the state.

A shortest plan is made of errands: take an object, treat it, put it somewhere, stand by a lamp. Between errands only
walking and opening are needed, and nothing else helps: hands hold one thing, doors never have to be closed, a target
only ever has to go to its appliance and then to its place, and what else is in the hand is best put down first. So it
is enough to price every order of errands. `breadth_first` makes no such assumption and serves as the check.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.game import Game
from agentgym.errors import AgentGymError

_TREATMENTS = {"clean": "clean", "hot": "heat", "cool": "cool"}


class PlannerTimeoutError(AgentGymError):
    """No plan was found, nor shown to be impossible, within the time allowed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no plan within {seconds:g} s; allow the planner more time or use the scripted expert")


@dataclass(frozen=True, slots=True)
class _Errand:
    """Something to do at a receptacle.

    Attributes:
        receptacle: index of the receptacle.
        verb: take, put, use, heat, clean, cool, or "" to be there.
        thing: index of the object.
        inside: whether the receptacle has to be open.
    """

    receptacle: int
    verb: str
    thing: int
    inside: bool


@dataclass(frozen=True, slots=True)
class _Position:
    """What matters of an engine's state. Indices as in `Game`."""

    location: int
    held: int
    closed: frozenset[int]
    contents: tuple[frozenset[int], ...]


def plan(engine: Engine, *, time_limit: float = 10.0) -> list[str] | None:
    """A shortest list of commands that wins from the engine's present state, which is left unchanged.

    Args:
        engine: where to start; its wording is used.
        time_limit: seconds of wall time.

    Returns:
        The commands ([] if the goal holds already), or None if the game cannot be won.

    Raises:
        PlannerTimeoutError: if the time does not suffice.
    """
    if engine.won:
        return []
    deadline = time.monotonic() + time_limit
    if "sliced" in engine.game.goal.states:  # needs a knife in the hand on the way, which errands do not describe
        return breadth_first(engine, time_limit=time_limit)
    start = _read(engine)
    best: list[_Errand] | None = None
    best_cost = 1 << 30
    for errands in _orders(engine, start):
        cost = _price(engine.game, start, errands, best_cost)
        if cost < best_cost:
            best, best_cost = errands, cost
        if time.monotonic() > deadline:
            raise PlannerTimeoutError(time_limit)
    if best is None:
        return None
    return _commands(engine, start, best)


def breadth_first(engine: Engine, *, time_limit: float = 60.0) -> list[str] | None:
    """A shortest plan by exhaustive search over engine states: exact for any goal, but only for small games.

    Args:
        engine: where to start.
        time_limit: seconds of wall time.

    Returns:
        As for `plan`.

    Raises:
        PlannerTimeoutError: if the time does not suffice.
    """
    if engine.won:
        return []
    deadline = time.monotonic() + time_limit
    seen = {engine.state_key()}
    queue: deque[tuple[Engine, tuple[str, ...]]] = deque([(engine, ())])
    while queue:
        here, path = queue.popleft()
        for command in here.admissible():
            if command.startswith(("examine ", "look", "inventory", "help")):
                continue
            there = here.fork()
            there.step(command)
            key = there.state_key()
            if key in seen:
                continue
            seen.add(key)
            if there.won:
                return [*path, command]
            queue.append((there, (*path, command)))
        if time.monotonic() > deadline:
            raise PlannerTimeoutError(time_limit)
    return None


def _read(engine: Engine) -> _Position:
    game = engine.game
    return _Position(
        location=game.receptacle_location[game.receptacle_index[engine.here[0]]] if engine.here else -1,
        held=game.object_index[engine.held] if engine.held else -1,
        closed=frozenset(r for r, name in enumerate(game.receptacle_names) if not engine.is_open(name)),
        contents=tuple(
            frozenset(game.object_index[thing] for thing in engine.receptacle_contents(name))
            for name in game.receptacle_names
        ),
    )


def _located(game: Game) -> list[int]:
    return [r for r, location in enumerate(game.receptacle_location) if location >= 0]


def _orders(engine: Engine, position: _Position) -> Iterator[list[_Errand]]:
    """All sensible orders of errands that reach the goal."""
    goal_orders = _light_orders if engine.game.goal_lamps else _place_orders
    yield from goal_orders(engine, position)
    if position.held < 0:
        return
    for receptacle in _drops(engine, position):
        contents = list(position.contents)
        contents[receptacle] |= {position.held}
        emptied = replace(position, held=-1, contents=tuple(contents))
        drop = _Errand(receptacle, "put", position.held, True)
        for rest in goal_orders(engine, emptied):
            yield [drop, *rest]


def _drops(engine: Engine, position: _Position) -> Iterator[int]:
    """Where the held object may be put down: everywhere that matters, and one of each sort elsewhere."""
    game = engine.game
    relevant = {position.location}
    for r in _located(game):
        appliance = (game.sinks | game.microwaves | game.fridges) >> r & 1
        holds = any((game.goal_objects | game.goal_lamps) >> thing & 1 for thing in position.contents[r])
        if appliance or holds or r in game.goal_receptacles:
            relevant.add(game.receptacle_location[r])
    elsewhere: set[bool] = set()
    for r in _located(game):
        if not game.accepts[r] >> position.held & 1:
            continue
        if game.receptacle_location[r] not in relevant:
            if (r in position.closed) in elsewhere:
                continue
            elsewhere.add(r in position.closed)
        yield r


def _ways_to_hold(game: Game, position: _Position, thing: int) -> list[list[_Errand]]:
    """How to get an object into the hand: [] where it already is there."""
    if position.held == thing:
        return [[]]
    if position.held >= 0 or not game.abilities.pickupable >> thing & 1:
        return []
    return [[_Errand(r, "take", thing, True)] for r in _located(game) if thing in position.contents[r]]


def _targets(game: Game) -> list[int]:
    return [thing for thing in range(len(game.object_names)) if game.goal_objects >> thing & 1]


def _light_orders(engine: Engine, position: _Position) -> Iterator[list[_Errand]]:
    game = engine.game
    lamps = [
        _Errand(r, "" if "toggled" in engine.object_states(game.object_names[lamp]) else "use", lamp, False)
        for r in _located(game)
        for lamp in sorted(position.contents[r])
        if game.goal_lamps >> lamp & 1
    ]
    for target in _targets(game):
        for fetch in _ways_to_hold(game, position, target):
            yield from ([*fetch, lamp] for lamp in lamps if lamp.thing != target)


def _place_orders(engine: Engine, position: _Position) -> Iterator[list[_Errand]]:
    game = engine.game
    targets = _targets(game)
    two = game.goal.kind == "pick_two_obj_and_place"
    for place in game.goal_receptacles:
        if game.receptacle_location[place] < 0:
            continue
        brought = [
            (thing, [*errands, _Errand(place, "put", thing, True)])
            for thing in targets
            if game.accepts[place] >> thing & 1
            for errands in _ready(engine, position, thing)
        ]
        if not two:
            yield from (errands for _, errands in brought)
            continue
        there = [thing for thing in targets if thing in position.contents[place]]
        if there:
            yield from (errands for thing, errands in brought if thing not in there)
            continue
        after = replace(position, held=-1)
        rest = [
            (thing, [*fetch, _Errand(place, "put", thing, True)])
            for thing in targets
            if thing != position.held and game.accepts[place] >> thing & 1
            for fetch in _ways_to_hold(game, after, thing)
        ]
        yield from (first + second for one, first in brought for other, second in rest if one != other)


def _ready(engine: Engine, position: _Position, thing: int) -> Iterator[list[_Errand]]:
    """Errands after which an object is in the hand in the state that the goal asks for."""
    game = engine.game
    missing = [state for state in game.goal.states if state not in engine.object_states(game.object_names[thing])]
    for fetch in _ways_to_hold(game, position, thing):
        if not missing:
            yield fetch
            continue
        verb = _TREATMENTS[missing[0]]
        able, appliances = {
            "clean": (game.abilities.cleanable, game.sinks),
            "heat": (game.abilities.heatable, game.microwaves),
            "cool": (game.abilities.coolable, game.fridges),
        }[verb]
        if able >> thing & 1:
            inside = engine._strict and verb != "clean"
            for r in _located(game):
                if appliances >> r & 1:
                    yield [*fetch, _Errand(r, verb, thing, inside)]


def _price(game: Game, position: _Position, errands: Sequence[_Errand], limit: int) -> int:
    """Number of commands that errands take, or `limit` once it is reached."""
    location, cost = position.location, 0
    opened: list[int] = []
    for errand in errands:
        r = errand.receptacle
        if game.receptacle_location[r] != location:
            location = game.receptacle_location[r]
            cost += 1
        if errand.inside and r in position.closed and r not in opened:
            opened.append(r)
            cost += 1
        cost += bool(errand.verb)
        if cost >= limit:
            return limit
    return cost


def _commands(engine: Engine, position: _Position, errands: Sequence[_Errand]) -> list[str]:
    game = engine.game
    put = "put {} in/on {}" if engine.grammar == "put" else "move {} to {}"
    forms = {"take": "take {} from {}", "put": put, "use": "use {}"}
    location, commands = position.location, []
    opened: set[int] = set()
    for errand in errands:
        r = errand.receptacle
        place = game.receptacle_names[r]
        if game.receptacle_location[r] != location:
            location = game.receptacle_location[r]
            commands.append(f"go to {place}")
        if errand.inside and r in position.closed - opened:
            opened.add(r)
            commands.append(f"open {place}")
        if errand.verb:
            form = forms.get(errand.verb, f"{errand.verb} {{}} with {{}}")
            commands.append(form.format(game.object_names[errand.thing], place))
    return commands
