"""Common-sense knowledge of a household: which kind of object may lie in or on which kind of receptacle.

Type names are ALFRED's. The generator declares what it needs of this as `canContain` facts; the scripted expert uses it
only to decide where to look first, so a game with other rules is still played correctly.
"""

from __future__ import annotations

from collections.abc import Mapping

PRODUCE = ("Apple", "Egg", "Lettuce", "Potato", "Tomato")
FOOD = (*PRODUCE, "Bread")
VESSELS = ("Bowl", "Cup", "Mug", "Plate")
COOKWARE = ("Kettle", "Pan", "Pot")
CUTLERY = ("ButterKnife", "Fork", "Knife", "Ladle", "Spatula", "Spoon")
SHAKERS = ("PepperShaker", "SaltShaker")
GLASS = ("Glassbottle", "WineBottle")
TOILETRIES = ("Cloth", "DishSponge", "HandTowel", "SoapBar", "SoapBottle", "SprayBottle", "TissueBox")
PAPER = ("ToiletPaper", "ToiletPaperRoll")
POCKET = ("CD", "CellPhone", "CreditCard", "KeyChain", "Watch")
WRITING = ("Pen", "Pencil")
MEDIA = ("Book", "Laptop", "Newspaper", "RemoteControl")
ORNAMENTS = ("Candle", "Statue", "Vase")
SPORTS = ("BaseballBat", "BasketBall", "TennisRacket")
STORAGE = ("AlarmClock", "Box", "PaperTowel", "WateringCan")

_LOUNGE = ("BasketBall", "Box", "CellPhone", "CreditCard", "KeyChain", "Pillow", "Cloth", *MEDIA)
_FURNITURE = (
    *VESSELS, *GLASS, *PAPER, *POCKET, *WRITING, *MEDIA, *ORNAMENTS, *STORAGE,
    "BasketBall", "Cloth", "SoapBottle", "SprayBottle", "TennisRacket", "TissueBox",
)  # fmt: skip
_TABLE = (*FOOD, *COOKWARE, *CUTLERY, *SHAKERS, *_FURNITURE, "DishSponge", "HandTowel", "SoapBar", "BaseballBat")

MAY_HOLD: Mapping[str, tuple[str, ...]] = {
    "ArmChair": _LOUNGE,
    "BathtubBasin": ("Cloth", "DishSponge", "HandTowel", "SoapBar"),
    "Bed": (*SPORTS, *MEDIA, "CellPhone", "Pillow"),
    "Cabinet": (
        *VESSELS, *COOKWARE, *SHAKERS, *GLASS, *TOILETRIES, *PAPER,
        "Book", "Box", "Candle", "CD", "Ladle", "Newspaper", "Plunger", "Vase", "WateringCan",
    ),
    "Cart": (*TOILETRIES, *PAPER, *ORNAMENTS, "Mug", "PaperTowel", "Plunger"),
    "CoffeeMachine": ("Mug",),
    "CoffeeTable": _TABLE,
    "CounterTop": _TABLE,
    "Desk": _FURNITURE,
    "DiningTable": _TABLE,
    "Drawer": (
        *CUTLERY, *SHAKERS, *TOILETRIES, *PAPER, *POCKET, *WRITING,
        "Book", "Candle", "Newspaper", "RemoteControl", "WateringCan",
    ),
    "Dresser": _FURNITURE,
    "Fridge": (*FOOD, *VESSELS, *GLASS, "Pan", "Pot"),
    "GarbageCan": (*FOOD, *TOILETRIES, *PAPER, *WRITING, "CD", "Newspaper", "PaperTowel", "WineBottle"),
    "HandTowelHolder": ("HandTowel",),
    "LaundryHamper": ("Cloth",),
    "Microwave": ("Apple", "Bread", "Egg", "Potato", "Tomato", *VESSELS, "Glassbottle"),
    "Ottoman": _LOUNGE,
    "PaintingHanger": ("Painting",),
    "Safe": (*POCKET, "Statue", "Vase"),
    "Shelf": (
        *VESSELS, *SHAKERS, *GLASS, *TOILETRIES, *PAPER, *POCKET, *WRITING, *ORNAMENTS, *STORAGE,
        "Book", "Kettle", "Newspaper", "Pot", "RemoteControl",
    ),
    "SideTable": _TABLE,
    "SinkBasin": (
        *PRODUCE, *VESSELS, *COOKWARE, *CUTLERY, "Cloth", "DishSponge", "Glassbottle", "HandTowel", "SoapBar",
    ),
    "Sofa": _LOUNGE,
    "StoveBurner": COOKWARE,
    "Toaster": (),
    "Toilet": (*TOILETRIES, *PAPER, "Candle", "Newspaper", "PaperTowel"),
    "ToiletPaperHanger": PAPER,
    "TowelHolder": ("Towel",),
    "TVStand": ("TissueBox",),
}  # fmt: skip

LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf", "DiningTable", "CoffeeTable")

APPLIANCES: Mapping[str, str] = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Treatment -> class (as displayed) of the receptacle that does it."""

PLACES_OF: Mapping[str, frozenset[str]] = {
    thing.lower(): frozenset(place.lower() for place, things in MAY_HOLD.items() if thing in things)
    for thing in sorted({thing for things in MAY_HOLD.values() for thing in things})
} | {lamp: frozenset(place.lower() for place in LAMP_STANDS) for lamp in ("desklamp", "floorlamp")}
"""Displayed object class -> displayed receptacle classes that may hold it."""
