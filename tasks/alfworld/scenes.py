"""Scenes: fixed rooms with their receptacles, drawn once per size and seed and shared by many games.

Which layouts belong to valid_unseen is decided by the layout itself (what stands in the room), so that no room of that
split looks like one of the others, however small the rooms are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from agentgym.tasks.alfworld.draws import Draw, stable_hash
from agentgym.tasks.alfworld.rooms import OPENABLE, ROOMS, SIZES

SEEN_SCENES = 200
UNSEEN_SCENES = 50
"""Scenes of each kind of room that train and valid_seen share, and that valid_unseen has for itself."""

_UNSEEN_SHARE = 5  # one layout in so many is held back
_WITH_COUNTER = {"CoffeeMachine": 0.6, "Toaster": 0.6}
_WITH_SAME = {"StoveBurner": 0.5, "Drawer": 0.12, "Cabinet": 0.12}
_STUCK_DOOR = {"Cabinet": 0.15, "Drawer": 0.05}
_ID_SUFFIX = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A receptacle of a scene.

    Attributes:
        type: ALFRED type name.
        id: mangled identifier.
        location: mangled identifier of where an agent stands to use it.
        openable: whether it has a door or drawer that opens (it is closed at first).
        position: x, height and z in metres, as in the identifier.
    """

    type: str
    id: str
    location: str
    openable: bool
    position: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Scene:
    """A room with its receptacles.

    Attributes:
        room: key of `rooms.ROOMS`.
        number: scene number, unique over all rooms of a size and seed.
        start: location where the agent starts, away from all receptacles.
        receptacles: what stands in it.
    """

    room: str
    number: int
    start: str
    receptacles: tuple[Receptacle, ...]

    def layout(self) -> str:
        """What an agent can tell apart about the room: the kinds of its receptacles and which of them open."""
        return self.room + ":" + ",".join(sorted(f"{r.type}{'*' * r.openable}" for r in self.receptacles))


def coordinate(value: float) -> str:
    """A coordinate in the mangled form of ALFRED's identifiers, such as `_plus_01_dot_23`."""
    whole, _, part = f"{abs(value):05.2f}".partition(".")
    return f"{'_minus_' if value < 0 else '_plus_'}{whole}_dot_{part}"


def identifier(name: str, position: tuple[float, float, float]) -> str:
    """The mangled identifier of a thing."""
    places = "_bar_".join(coordinate(value) for value in position)
    if name in _ID_SUFFIX:  # ALFRED names a basin after the fixture that it is part of
        return f"{_ID_SUFFIX[name]}_bar_{places}_bar_{name}"
    return f"{name}_bar_{places}"


def is_unseen(layout: str) -> bool:
    """Whether a layout is held back for valid_unseen."""
    return stable_hash("layout", layout) % _UNSEEN_SHARE == 0


@lru_cache(maxsize=2048)
def scene(size: str, seed: int, room: str, number: int) -> Scene:
    """A scene, drawn until it falls on its side of the held-back layouts.

    Args:
        size: key of `rooms.SIZES`.
        seed: seed of the task set.
        room: key of `rooms.ROOMS`.
        number: position within the room's scenes: seen ones first, then unseen ones.
    """
    attempt = 0
    while True:
        drawn = _draw_scene(Draw("scene", size, seed, room, number, attempt), size, room, number)
        if is_unseen(drawn.layout()) == (number >= SEEN_SCENES):
            return drawn
        attempt += 1


def _draw_scene(draw: Draw, size: str, room: str, number: int) -> Scene:
    kind, spec = ROOMS[room], SIZES[size]
    allowed = spec.extra.get(room)
    weights = {name: weight for name, (weight, _) in kind.extra.items() if allowed is None or name in allowed}
    limits = {name: limit for name, (_, limit) in kind.extra.items()}
    types = list(kind.always)
    wanted = min(draw.between(*spec.receptacles), len(types) + sum(limits[name] for name in weights))
    while len(types) < wanted:
        name = draw.weighted(weights)
        types.append(name)
        limits[name] -= 1
        if not limits[name]:
            del weights[name]

    taken: set[tuple[float, float, float] | str] = set()
    start = _draw_location(draw, taken)
    receptacles: list[Receptacle] = []
    for name in sorted(types):  # counters come before the machines that may stand on them
        position = draw_position(draw, taken)
        receptacles.append(
            Receptacle(
                name,
                identifier(name, position),
                (_shared_location(draw, name, receptacles) if spec.lifelike else None) or _draw_location(draw, taken),
                name in OPENABLE and not (spec.lifelike and draw.chance(_STUCK_DOOR.get(name, 0))),
                position,
            )
        )
    return Scene(room, kind.first_scene + number, start, tuple(receptacles))


def _shared_location(draw: Draw, name: str, placed: list[Receptacle]) -> str | None:
    """The location of an earlier receptacle that this one stands beside, if it does."""
    neighbour, chance = (
        ("CounterTop", _WITH_COUNTER[name]) if name in _WITH_COUNTER else (name, _WITH_SAME.get(name, 0))
    )
    beside = [other.location for other in placed if other.type == neighbour]
    return draw.pick(beside) if beside and draw.chance(chance) else None


def draw_position(
    draw: Draw,
    taken: set[tuple[float, float, float] | str],
    near: tuple[float, float, float] | None = None,
) -> tuple[float, float, float]:
    """A position not yet taken, rounded to centimetres; `near` keeps it within 40 cm of another."""
    while True:
        if near is None:
            position = (round(draw.unit() * 6 - 3, 2), round(draw.unit() * 2 + 0.05, 2), round(draw.unit() * 6 - 3, 2))
        else:
            spread = (0.8, 0.2, 0.8)
            position = tuple(round(c + (draw.unit() - 0.5) * s, 2) for c, s in zip(near, spread, strict=True))  # type: ignore[assignment]
        position = (position[0] + 0.0, position[1] + 0.0, position[2] + 0.0)  # no negative zero
        if position not in taken:
            taken.add(position)
            return position


def _draw_location(draw: Draw, taken: set[tuple[float, float, float] | str]) -> str:
    while True:
        numbers = (
            draw.between(-10, 10),
            draw.between(-10, 10),
            draw.between(0, 3),
            draw.pick((-30, -15, 0, 15, 30, 45, 60)),
        )
        name = "loc_bar_" + "_bar_".join(f"_minus_{-n}" if n < 0 else str(n) for n in numbers)
        if name not in taken:
            taken.add(name)
            return name
