"""Tables behind the generated games: kinds of room, what stands in them, what lies about, and the named sizes.

Type names are ALFRED's, so that generated games look like the official ones; the tables are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym.envs.alfworld.places import (
    COOKWARE,
    CUTLERY,
    FOOD,
    GLASS,
    MAY_HOLD,
    MEDIA,
    ORNAMENTS,
    PAPER,
    POCKET,
    PRODUCE,
    SHAKERS,
    SPORTS,
    TOILETRIES,
    VESSELS,
    WRITING,
)

SIMPLE = "pick_and_place_simple"
LIGHT = "look_at_obj_in_light"
CLEAN = "pick_clean_then_place_in_recep"
HEAT = "pick_heat_then_place_in_recep"
COOL = "pick_cool_then_place_in_recep"
TWO = "pick_two_obj_and_place"
KINDS = (SIMPLE, LIGHT, CLEAN, HEAT, COOL, TWO)

TEMPLATES: Mapping[str, tuple[str, str]] = {
    SIMPLE: ("put a {obj} in {recep}", "put some {obj} on {recep}"),
    LIGHT: ("look at {obj} under the {toggle}", "examine the {obj} with the {toggle}"),
    CLEAN: ("put a clean {obj} in {recep}", "clean some {obj} and put it in {recep}"),
    HEAT: ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
    COOL: ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
    TWO: ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
}
"""Task kind -> its two sentences; slots take lower-cased type names."""

HEATABLE = frozenset({*PRODUCE, "Bread", "Cup", "Mug", "Plate"} - {"Lettuce"})
COOLABLE = frozenset({*FOOD, *VESSELS, "Pan", "Pot", "WineBottle"})
CLEANABLE = frozenset({*PRODUCE, *VESSELS, *COOKWARE, *CUTLERY, "Cloth", "DishSponge", "SoapBar"})
SLICEABLE = frozenset(FOOD)
TOGGLEABLE = frozenset({"DeskLamp", "FloorLamp"})
OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
CONTAINERS = frozenset({*VESSELS, "Box", "Pan", "Pot"})

TREATABLE: Mapping[str, frozenset[str]] = {CLEAN: CLEANABLE, HEAT: HEATABLE, COOL: COOLABLE}
APPLIANCE: Mapping[str, str] = {CLEAN: "SinkBasin", HEAT: "Microwave", COOL: "Fridge"}

FIXTURES = (
    "Chair",
    "LightSwitch",
    "Window",
    "Sink",
    "Bathtub",
    "StoveKnob",
    "Mirror",
    "Painting",
    "Curtains",
    "Blinds",
)
"""Decoration that stands or hangs beside a receptacle; it is never listed and cannot be picked up."""

NOT_PICKABLE = frozenset(
    {*FIXTURES, *TOGGLEABLE, "HousePlant", "Television", "ShowerDoor", "ShowerGlass", "LaundryHamperLid"}
)

OTHER_TYPES = (
    "Boots", "Footstool", "PaperTowelRoll", "Poster", "ScrubBrush", "TeddyBear", "Towel", "Pillow", "Plunger",
)  # fmt: skip

OBJECT_TYPES = tuple(
    sorted(
        {thing for things in MAY_HOLD.values() for thing in things}
        | NOT_PICKABLE
        | set(OTHER_TYPES)
        | {
            thing
            for group in (SPORTS, MEDIA, ORNAMENTS, SHAKERS, GLASS, PAPER, POCKET, TOILETRIES, WRITING)
            for thing in group
        }
    )
)
RECEPTACLE_TYPES = tuple(sorted(MAY_HOLD))


@dataclass(frozen=True, slots=True)
class Room:
    """One kind of room.

    Attributes:
        title: as in ALFRED's list of scene kinds.
        first_scene: scene numbers of this room begin here; they lie outside ALFRED's.
        always: receptacle types present in every such room.
        extra: further receptacle types -> how often they are drawn (weight) and how many fit.
        things: types of small objects found here.
        fixtures: decoration that cannot be picked up and is not in any receptacle.
        standing: decoration that cannot be picked up -> receptacle types it stands on.
        kinds: task kinds that make sense here.
    """

    title: str
    first_scene: int
    always: tuple[str, ...]
    extra: Mapping[str, tuple[float, int]]
    things: tuple[str, ...]
    fixtures: tuple[str, ...]
    standing: Mapping[str, tuple[str, ...]]
    kinds: tuple[str, ...]


KITCHEN, LIVING_ROOM, BEDROOM, BATHROOM = "kitchen", "living_room", "bedroom", "bathroom"

ROOMS: Mapping[str, Room] = {
    KITCHEN: Room(
        "Kitchen",
        1001,
        ("Fridge", "Microwave", "SinkBasin"),
        {
            "Cabinet": (6, 8), "Drawer": (5, 6), "CounterTop": (4, 3), "StoveBurner": (2, 4), "DiningTable": (1, 2),
            "CoffeeMachine": (1, 1), "Toaster": (1, 1), "GarbageCan": (1, 1), "Shelf": (2, 3), "SideTable": (0.7, 1),
            "Cart": (0.3, 1),
        },
        (
            *FOOD, *VESSELS, *COOKWARE, *CUTLERY, *SHAKERS, *GLASS, "DishSponge", "SoapBottle", "PaperTowel", "Vase",
            "Book",
        ),
        ("Chair", "LightSwitch", "Window", "Sink", "StoveKnob", "Blinds"),
        {"HousePlant": ("CounterTop", "DiningTable", "SideTable", "Shelf")},
        (SIMPLE, CLEAN, HEAT, COOL, TWO),
    ),
    LIVING_ROOM: Room(
        "LivingRoom",
        2001,
        ("Sofa", "CoffeeTable"),
        {
            "Drawer": (5, 7), "Cabinet": (3, 6), "Shelf": (4, 8), "ArmChair": (2, 2), "SideTable": (2, 3),
            "TVStand": (1, 1), "Dresser": (1, 1), "DiningTable": (1, 1), "GarbageCan": (1, 1), "Ottoman": (0.5, 1),
            "Safe": (0.5, 1), "Desk": (1, 1), "CoffeeTable": (1, 1),
        },
        (
            *POCKET, *MEDIA, *ORNAMENTS, *WRITING, "Box", "Bowl", "Pillow", "Plate", "TissueBox", "WateringCan",
            "BasketBall",
        ),
        ("Chair", "LightSwitch", "Window", "Painting", "Curtains", "FloorLamp"),
        {
            "HousePlant": ("CoffeeTable", "SideTable", "DiningTable", "Dresser", "Shelf"),
            "Television": ("TVStand", "Dresser"),
        },
        (SIMPLE, LIGHT, TWO),
    ),
    BEDROOM: Room(
        "Bedroom",
        3001,
        ("Bed", "Desk"),
        {
            "Drawer": (6, 9), "Shelf": (4, 7), "SideTable": (2, 2), "Cabinet": (2, 4), "Dresser": (1, 1),
            "GarbageCan": (1, 1), "LaundryHamper": (0.5, 1), "ArmChair": (0.7, 1), "Safe": (0.7, 1), "Desk": (1, 1),
            "TVStand": (0.3, 1), "Sofa": (0.3, 1),
        },
        (
            *POCKET, *WRITING, *SPORTS, "AlarmClock", "Book", "Bowl", "Box", "Cloth", "Laptop", "Mug", "Pillow",
            "Statue", "TissueBox", "Vase",
        ),
        ("Chair", "LightSwitch", "Window", "Mirror", "Painting", "Blinds", "LaundryHamperLid"),
        {"HousePlant": ("Desk", "SideTable", "Dresser", "Shelf"), "Television": ("TVStand", "Dresser")},
        (SIMPLE, LIGHT, TWO),
    ),
    BATHROOM: Room(
        "Bathroom",
        4001,
        ("SinkBasin", "Toilet", "CounterTop"),
        {
            "Cabinet": (5, 7), "Drawer": (4, 6), "BathtubBasin": (1, 1), "SinkBasin": (1, 1), "TowelHolder": (1, 1),
            "HandTowelHolder": (1, 2), "ToiletPaperHanger": (1, 1), "GarbageCan": (1, 1), "Shelf": (2, 4),
            "SideTable": (0.7, 1), "Cart": (0.4, 1), "LaundryHamper": (0.4, 1), "Dresser": (0.3, 1),
        },
        (*TOILETRIES, *PAPER, "Candle", "PaperTowel", "Plunger", "Towel"),
        ("LightSwitch", "Mirror", "Sink", "Bathtub", "ShowerDoor", "ShowerGlass", "Window"),
        {"HousePlant": ("CounterTop", "SideTable", "Shelf")},
        (SIMPLE, CLEAN, TWO),
    ),
}  # fmt: skip

_SMALL_EXTRA = ("CounterTop", "DiningTable", "Cabinet", "Drawer", "Shelf", "GarbageCan", "StoveBurner")
_SMALL_BEDROOM = ("Drawer", "Shelf", "SideTable", "Dresser", "Cabinet", "Safe", "ArmChair")
_FOUR = (SIMPLE, HEAT, COOL, CLEAN)
_KITCHEN_16 = (
    "Apple", "Bowl", "Bread", "Cup", "Egg", "Fork", "Knife", "Lettuce", "Mug", "Pan", "Plate", "Potato", "SaltShaker",
    "SoapBottle", "Spoon", "Tomato",
)  # fmt: skip
_BEDROOM_8 = ("AlarmClock", "Book", "CD", "CellPhone", "KeyChain", "Pen", "Pencil", "Watch")


@dataclass(frozen=True, slots=True)
class Size:
    """A named size of generated game.

    Attributes:
        receptacles: smallest and largest number of receptacles.
        objects: smallest and largest number of small objects.
        kinds: task kinds, drawn in equal shares.
        rooms: kinds of room.
        step_cap: number of turns that learning experiments allow.
        things: kind of room -> object types, where they are restricted.
        extra: kind of room -> receptacle types added to those always present, where they are restricted.
        lifelike: adds what official games have: shared locations, doors that do not open, things inside things,
            decoration, sliceables, all types declared.
    """

    receptacles: tuple[int, int]
    objects: tuple[int, int]
    kinds: tuple[str, ...]
    rooms: tuple[str, ...]
    step_cap: int
    things: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lifelike: bool = False


_SMALL: Mapping[str, tuple[str, ...]] = {KITCHEN: _SMALL_EXTRA, BEDROOM: _SMALL_BEDROOM}

SIZES: Mapping[str, Size] = {
    "xs": Size((5, 5), (4, 4), _FOUR, (KITCHEN,), 16, {KITCHEN: ("Apple", "Egg", "Mug", "Plate")}, _SMALL),
    "s": Size((6, 6), (5, 5), _FOUR, (KITCHEN,), 20, {KITCHEN: ("Apple", "Egg", "Mug", "Plate", "Tomato")}, _SMALL),
    "m": Size(
        (7, 8), (6, 8), _FOUR, (KITCHEN,), 24,
        {KITCHEN: ("Apple", "Bowl", "Cup", "Egg", "Lettuce", "Mug", "Plate", "Tomato")}, _SMALL,
    ),
    "l4": Size((8, 10), (8, 12), _FOUR, (KITCHEN,), 30, {KITCHEN: _KITCHEN_16}, _SMALL),
    "l": Size((8, 10), (8, 12), KINDS, (KITCHEN, BEDROOM), 30, {KITCHEN: _KITCHEN_16, BEDROOM: _BEDROOM_8}, _SMALL),
    "xl": Size(
        (12, 16), (16, 24), KINDS, (KITCHEN, BEDROOM), 40,
        {KITCHEN: _KITCHEN_16, BEDROOM: (*_BEDROOM_8, "CreditCard", "Box", "Laptop")}, _SMALL,
    ),
    "real": Size((20, 30), (45, 55), KINDS, tuple(ROOMS), 50, lifelike=True),
}  # fmt: skip
DEFAULT_SIZE = "real"


def task_text(kind: str, template: int, *, thing: str, receptacle: str = "", toggle: str = "") -> str:
    """The sentence that states a task, as official games have it (without the full stop).

    Args:
        kind: one of `KINDS`.
        template: 0 or 1.
        thing: type name of the target object.
        receptacle: type name of the target receptacle.
        toggle: type name of the lamp.
    """
    return TEMPLATES[kind][template].format(obj=thing.lower(), recep=receptacle.lower(), toggle=toggle.lower())
