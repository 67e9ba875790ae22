"""The ALFWorld text engine: the reference's transitions, texts and admissible commands without its interpreter.

Rules, wording and oddities are those of the `alfworld` package 0.4.2 (and 0.3.5 for the older wording) on
`textworld` 1.7.0. The state is a handful of integers; everything else lies in the shared `Game`.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from agentgym.envs.alfworld import state_codec
from agentgym.envs.alfworld.game import Game
from agentgym.envs.alfworld.wording import MIDDLE_OF_ROOM, NOTHING_HAPPENS, WELCOME, listing
from agentgym.errors import choices

_EXAMINE_RECEPTACLE, _EXAMINE_OBJECT, _OPEN, _CLOSE, _TAKE, _PUT, _USE, _HEAT, _CLEAN, _COOL, _SLICE = range(11)

_Action = tuple[int, int, int]  # kind, object (or what is sliced), receptacle (or the knife); -1 where there is none

_ADVERBS = {  # (hot, cool, clean, sliced) -> what `examine` says; hot and cool exclude each other
    (0, 0, 1, 0): "clean ",
    (0, 0, 1, 1): "clean sliced ",
    (0, 1, 0, 0): "cold ",
    (0, 1, 0, 1): "cool sliced ",
    (0, 1, 1, 0): "cool and clean ",
    (0, 1, 1, 1): "cool and clean sliced ",
    (1, 0, 0, 0): "hot ",
    (1, 0, 0, 1): "hot sliced ",
    (1, 0, 1, 0): "hot and clean ",
    (1, 0, 1, 1): "hot and clean sliced ",
}


class Engine:
    """One play of a game. Not for concurrent use; any number may share a `Game`.

    Args:
        game: what to play.
        grammar: "move" or "put" plays the game in that wording whatever its file says; "file" keeps the file's.
        strict_appliances: heating needs an open microwave and cooling an open fridge. The reference has no such
            rule: there, closed appliances work.

    Raises:
        UsageError: if `grammar` is none of the three.
    """

    __slots__ = (
        "_actions",
        "_admissible",
        "_clean",
        "_contents",
        "_cool",
        "_found",
        "_held",
        "_hot",
        "_key",
        "_location",
        "_objects_at",
        "_opened",
        "_put",
        "_removed",
        "_sliced",
        "_strict",
        "_toggled",
        "_visited",
        "game",
        "valid_last",
    )

    def __init__(
        self,
        game: Game,
        *,
        grammar: Literal["file", "move", "put"] = "file",
        strict_appliances: bool = False,
    ) -> None:
        if grammar not in ("file", "move", "put"):
            raise choices("grammar", grammar, ("file", "move", "put"))
        self.game = game
        self.valid_last = True
        self._put = (game.grammar if grammar == "file" else grammar) == "put"
        self._strict = strict_appliances
        self._actions: dict[str, _Action] | None = None
        self._admissible: tuple[str, ...] | None = None
        self._key: str | None = None
        self._start()

    def _start(self) -> None:
        first = self.game.initial
        self._location = first.location
        self._held = first.held
        self._opened = first.opened
        self._hot = first.hot
        self._cool = first.cool
        self._clean = first.clean
        self._sliced = first.sliced
        self._toggled = first.toggled
        self._contents = list(first.contents)
        self._objects_at = list(first.objects_at)
        # For each receptacle, the objects taken from it and not put back: `look` finds those "next to it" if they
        # are at its location, because the reference knows an explicit "not in it" only of what once was in it.
        self._removed = [0] * len(first.contents)
        self._visited = 0
        self._found = 0
        self._changed()

    def _changed(self) -> None:
        self._actions = None
        self._admissible = None
        self._key = None

    # -- playing ---------------------------------------------------------------------------------------------

    def reset(self) -> str:
        """Back to the initial state; returns the first observation."""
        self._start()
        self.valid_last = True
        game = self.game
        if game.receptacles_at[self._location]:
            scene = self._look()
        else:
            located = zip(game.receptacle_names, game.receptacle_location, strict=True)
            scene = MIDDLE_OF_ROOM + listing([f"a {name}" for name, location in located if location >= 0]) + "."
        return f"{WELCOME}\n\n{scene}\n\n{game.task_line}"

    def step(self, command: str) -> str:
        """Carries out a command; returns its feedback.

        White space round the command does not matter. A command that is not admissible changes nothing and is
        answered with "Nothing happens.".
        """
        command = command.strip()
        game = self.game
        self.valid_last = True
        target = game.go_to.get(command)
        if target is not None:
            location = game.receptacle_location[target]
            if location != self._location:
                self._location = location
                self._changed()
                place = game.location_names[location] if self._put else game.receptacle_names[target]
                return f"You arrive at {place}. {self._view(target)}"
        elif command == "look":
            return self._look()
        elif command == "inventory":
            return f"You are carrying: a {self.held}." if self._held >= 0 else "You are not carrying anything."
        elif command == "help" and not self._put:
            return game.help_text
        else:
            action = self._local_actions().get(command)
            if action is not None:
                return self._act(*action)
        self.valid_last = False
        return NOTHING_HAPPENS

    @property
    def won(self) -> bool:
        """Whether the goal holds now. It can hold at the start, and cease to hold again."""
        game = self.game
        if game.goal_lamps:
            if self._held < 0 or not game.goal_objects >> self._held & 1:
                return False
            lit = game.goal_lamps & self._toggled
            return any(self._contents[r] & lit for r in game.receptacles_at[self._location])
        targets = game.goal_objects
        for state in game.goal.states:
            targets &= self._having(state)
        needed = 2 if game.goal.kind == "pick_two_obj_and_place" else 1
        return any((self._contents[r] & targets).bit_count() >= needed for r in game.goal_receptacles)

    def admissible(self) -> tuple[str, ...]:
        """The commands that do something now, sorted by code point."""
        if self._admissible is None:
            actions = self._local_actions()
            # Every command begins with a verb, so that the sorted list is: what sorts before "go to", the `go to`
            # commands (sorted once for each location), and the rest.
            early = sorted(command for command in actions if command < "g")
            late = [command for command in actions if command > "g"]
            late += ("inventory", "look") if self._put else ("help", "inventory", "look")
            late.sort()
            self._admissible = (*early, *self.game.go_to_from[self._location], *late)
        return self._admissible

    def _local_actions(self) -> dict[str, _Action]:
        """What can be done with the receptacles here and with the object in the hand."""
        if self._actions is not None:
            return self._actions
        game = self.game
        able = game.abilities
        names, places = game.object_names, game.receptacle_names
        actions: dict[str, _Action] = {}
        held = self._held
        mine = 1 << held if held >= 0 else 0
        name = names[held] if mine else ""
        for r in game.receptacles_at[self._location]:
            place = places[r]
            bit = 1 << r
            contents = self._contents[r]
            actions[f"examine {place}"] = (_EXAMINE_RECEPTACLE, -1, r)
            accessible = not game.openable & bit or bool(self._opened & bit)
            if game.openable & bit:
                if accessible:
                    actions[f"close {place}"] = (_CLOSE, -1, r)
                else:
                    actions[f"open {place}"] = (_OPEN, -1, r)
            lamps = contents & able.toggleable
            while lamps:
                low = lamps & -lamps
                o = low.bit_length() - 1
                actions[f"use {names[o]}"] = (_USE, o, r)
                lamps ^= low
            if mine:
                if accessible and game.accepts[r] & mine:
                    actions[f"put {name} in/on {place}" if self._put else f"move {name} to {place}"] = (_PUT, held, r)
                if game.sinks & bit and able.cleanable & mine:
                    actions[f"clean {name} with {place}"] = (_CLEAN, held, r)
                if not self._strict or accessible:
                    if game.microwaves & bit and able.heatable & mine:
                        actions[f"heat {name} with {place}"] = (_HEAT, held, r)
                    if game.fridges & bit and able.coolable & mine:
                        actions[f"cool {name} with {place}"] = (_COOL, held, r)
            elif accessible:
                takable = contents & able.pickupable
                while takable:
                    low = takable & -takable
                    o = low.bit_length() - 1
                    actions[f"take {names[o]} from {place}"] = (_TAKE, o, r)
                    takable ^= low
        if mine:
            actions[f"examine {name}"] = (_EXAMINE_OBJECT, held, -1)
            if able.knives & mine:
                whole = able.sliceable & self._objects_at[self._location]
                while whole:
                    low = whole & -whole
                    o = low.bit_length() - 1
                    actions[f"slice {names[o]} with {name}"] = (_SLICE, o, held)
                    whole ^= low
        self._actions = actions
        return actions

    def _act(self, kind: int, o: int, r: int) -> str:
        game = self.game
        if kind == _EXAMINE_RECEPTACLE:
            return self._view(r)
        if kind == _EXAMINE_OBJECT:
            return self._examine(o)
        self._changed()
        if kind == _OPEN:
            self._opened |= 1 << r
            return f"You open the {game.receptacle_names[r]}. {self._view(r)}"
        if kind == _CLOSE:
            self._opened &= ~(1 << r)
            return f"You close the {game.receptacle_names[r]}."
        bit = 1 << o
        name = game.object_names[o]
        if kind == _USE:
            self._toggled |= bit
            return f"You turn on the {name}."
        if kind == _SLICE:
            self._sliced |= bit
            return f"You sliced the {name} with the {game.object_names[r]}."
        place = game.receptacle_names[r]
        if kind == _TAKE:
            self._contents[r] &= ~bit
            self._removed[r] |= bit
            self._objects_at[self._location] &= ~bit
            self._held = o
            self._found |= bit
            return f"You pick up the {name} from the {place}."
        if kind == _PUT:
            self._contents[r] |= bit
            self._removed[r] &= ~bit
            self._objects_at[self._location] |= bit
            self._held = -1
            return f"You put the {name} in/on the {place}." if self._put else f"You move the {name} to the {place}."
        if kind == _CLEAN:
            self._clean |= bit
            return f"You clean the {name} using the {place}."
        if kind == _HEAT:
            self._hot |= bit
            self._cool &= ~bit
            return f"You heat the {name} using the {place}."
        self._cool |= bit
        self._hot &= ~bit
        return f"You cool the {name} using the {place}."

    def _view(self, r: int) -> str:
        """What a receptacle looks like from outside, or inside if it is open. Marks it and its contents as seen."""
        game = self.game
        name = game.receptacle_names[r]
        self._visited |= 1 << r
        if game.openable >> r & 1:
            if not self._opened >> r & 1:
                return f"The {name} is closed."
            start = f"The {name} is open. In it"
        else:
            start = f"On the {name}"
        contents = self._contents[r]
        self._found |= contents
        return f"{start}, you see {listing([f'a {thing}' for thing in self._named(contents)])}."

    def _examine(self, o: int) -> str:
        game = self.game
        if o in game.holder_texts:
            return game.holder_texts[o]
        name = game.object_names[o]
        hot, cool, clean, sliced = (mask >> o & 1 for mask in (self._hot, self._cool, self._clean, self._sliced))
        if hot or clean or cool:
            return f"This is a {_ADVERBS[hot, cool if not hot else 0, clean, sliced]}{name}."
        if game.abilities.toggleable & self._toggled & 1 << o:
            return f"This {name} is on."
        if sliced and game.abilities.sliceable >> o & 1:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    def _look(self) -> str:
        here = self.game.receptacles_at[self._location]
        if not here:
            return f"{MIDDLE_OF_ROOM}nothing."
        beside: list[str] = []
        present = self._objects_at[self._location]
        removed = 0
        for r in here:
            removed |= self._removed[r]
        for o in _indices(present & removed):
            beside += [f"a {self.game.object_names[o]}"] * sum(self._removed[r] >> o & 1 for r in here)
        self._found |= present & removed
        facing = listing([self.game.receptacle_names[r] for r in here])
        return f"You are facing the {facing}. Next to it, you see {listing(beside)}."

    def _named(self, mask: int) -> list[str]:
        names = self.game.object_names
        return [names[o] for o in _indices(mask)]

    def _having(self, state: str) -> int:
        if state == "hot":
            return self._hot
        if state == "cool":
            return self._cool
        return self._clean if state == "clean" else self._sliced

    # -- looking on, without taking part ----------------------------------------------------------------------

    @property
    def grammar(self) -> Literal["move", "put"]:
        """The wording in which this engine plays."""
        return "put" if self._put else "move"

    @property
    def here(self) -> tuple[str, ...]:
        """Names of the receptacles at the agent's location; () in the middle of the room."""
        return tuple(self.game.receptacle_names[r] for r in self.game.receptacles_at[self._location])

    @property
    def held(self) -> str | None:
        """Name of the object in the agent's hand."""
        return self.game.object_names[self._held] if self._held >= 0 else None

    @property
    def visited(self) -> tuple[str, ...]:
        """Names of the receptacles that some feedback has described so far, from outside or inside."""
        return tuple(self.game.receptacle_names[r] for r in _indices(self._visited))

    @property
    def found(self) -> tuple[str, ...]:
        """Names of the objects that some feedback has shown so far."""
        return tuple(self._named(self._found))

    def receptacle_contents(self, name: str) -> tuple[str, ...]:
        """Names of the objects truly in or on a receptacle, be it open or closed.

        Raises:
            UsageError: if the game has no such receptacle.
        """
        return tuple(self._named(self._contents[self._receptacle(name)]))

    def is_openable(self, name: str) -> bool:
        """Whether a receptacle can be opened and closed.

        Raises:
            UsageError: if the game has no such receptacle.
        """
        return bool(self.game.openable >> self._receptacle(name) & 1)

    def is_open(self, name: str) -> bool:
        """Whether the contents of a receptacle are within reach: it is open, or cannot be closed.

        Raises:
            UsageError: if the game has no such receptacle.
        """
        r = self._receptacle(name)
        return not self.game.openable >> r & 1 or bool(self._opened >> r & 1)

    def object_states(self, name: str) -> frozenset[str]:
        """Which of clean, cool, hot, sliced and toggled hold for an object.

        Raises:
            UsageError: if the game has no such object.
        """
        o = self.game.object_index.get(name)
        if o is None:
            raise choices("object", name, self.game.object_names)
        masks = {state: self._having(state) for state in ("clean", "cool", "hot", "sliced")}
        return frozenset(state for state, mask in (masks | {"toggled": self._toggled}).items() if mask >> o & 1)

    def _receptacle(self, name: str) -> int:
        r = self.game.receptacle_index.get(name)
        if r is None:
            raise choices("receptacle", name, self.game.receptacle_names)
        return r

    # -- copies ---------------------------------------------------------------------------------------------

    def fork(self) -> Engine:
        """An independent engine in the same state."""
        copy = Engine.__new__(Engine)
        for slot in Engine.__slots__:
            setattr(copy, slot, getattr(self, slot))
        copy._contents = self._contents.copy()
        copy._objects_at = self._objects_at.copy()
        copy._removed = self._removed.copy()
        return copy

    def snapshot(self) -> bytes:
        """The state as bytes: versioned, the same in every process, for engines of the same game and options."""
        return self._pack(self.valid_last, self._visited, self._found, self._removed)

    def restore(self, snapshot: bytes) -> None:
        """Goes to the state of a snapshot.

        Raises:
            UsageError: if it is no snapshot, of another version, or of another game or other options. The engine is
                unchanged then.
        """
        values = state_codec.decode(self.game, self._options(), snapshot)
        valid, self._location, held, self._opened, self._visited, *masks = values
        self.valid_last = bool(valid)
        self._held = held - 1
        self._hot, self._cool, self._clean, self._sliced, self._toggled, self._found, *masks = masks
        receptacles = len(self._contents)
        self._contents = masks[:receptacles]
        self._removed = masks[receptacles : 2 * receptacles]
        self._objects_at = masks[2 * receptacles :]
        self._changed()

    def state_key(self) -> str:
        """Digest (32 hex digits) of the true state: equal keys have the same continuation.

        What the agent has seen is left out, and so are former places of objects that no text can show any more.
        """
        if self._key is None:
            shown = zip(self._removed, self.game.shared_accepts, strict=True)
            packed = self._pack(True, 0, 0, [removed & accepted for removed, accepted in shown])
            self._key = hashlib.blake2b(packed, digest_size=16).hexdigest()
        return self._key

    def _pack(self, valid: bool, visited: int, found: int, removed: list[int]) -> bytes:
        object_masks = (self._hot, self._cool, self._clean, self._sliced, self._toggled, found)
        places = (*self._contents, *removed, *self._objects_at)
        values = (int(valid), self._location, self._held + 1, self._opened, visited, *object_masks, *places)
        return state_codec.encode(self.game, self._options(), values)

    def _options(self) -> int:
        return int(self._put) | int(self._strict) << 1


def _indices(mask: int) -> list[int]:
    """Positions of the set bits, ascending."""
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
