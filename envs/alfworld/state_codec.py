"""Snapshots of an engine's state as bytes: compact, versioned, independent of the process, never pickle.

Layout, all integers little-endian: magic (3 bytes), version (1), options (1), digest of the game (16), the values
in the order of `layout`, checksum (8). The checksum finds damage; it is no signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from agentgym.envs.alfworld.game import Game
from agentgym.errors import UsageError

MAGIC = b"AWS"
VERSION = 1
_HEADER = len(MAGIC) + 2 + 16
_CHECKSUM = 8


def layout(game: Game) -> list[tuple[int, int]]:
    """The groups of values of a state, as (how many, exclusive upper bound).

    In order: valid_last; location; held + 1; opened and visited (bit sets of receptacles); hot, cool, clean, sliced,
    toggled, found, then contents and removed of each receptacle and objects_at of each location (bit sets of
    objects).
    """
    receptacles, objects, locations = len(game.receptacle_names), len(game.object_names), len(game.location_names)
    return [
        (1, 2),
        (1, locations),
        (1, objects + 1),
        (2, 1 << receptacles),
        (6 + 2 * receptacles + locations, 1 << objects),
    ]


def encode(game: Game, options: int, values: Sequence[int]) -> bytes:
    """Packs a state.

    Args:
        game: the game it belongs to.
        options: the engine's options, 0..255.
        values: as `layout` says.
    """
    parts: list[bytes] = []
    start = 0
    for count, bound in layout(game):
        width = _width(bound)
        parts += [value.to_bytes(width, "little") for value in values[start : start + count]]
        start += count
    body = b"".join(parts)
    packed = MAGIC + bytes([VERSION, options]) + game.digest + body
    return packed + _checksum(packed)


def decode(game: Game, options: int, packed: bytes) -> list[int]:
    """Unpacks a state.

    Raises:
        UsageError: if the bytes are no intact snapshot of this game, these options and this version.
    """
    if not isinstance(packed, bytes) or not packed.startswith(MAGIC) or len(packed) < _HEADER + _CHECKSUM:
        raise UsageError("this is no ALFWorld snapshot; pass what Engine.snapshot returned")
    if packed[3] != VERSION:
        raise UsageError(f"the snapshot has version {packed[3]}, not {VERSION}; take it with this release")
    if packed[4] != options:
        raise UsageError("the snapshot is of an engine with other options; give both the same grammar and rules")
    if packed[5:_HEADER] != game.digest:
        raise UsageError("the snapshot is of another game; restore it in an engine of the game it was taken from")
    body = packed[_HEADER:-_CHECKSUM]
    groups = layout(game)
    size = sum(count * _width(bound) for count, bound in groups)
    if len(body) != size or _checksum(packed[:-_CHECKSUM]) != packed[-_CHECKSUM:]:
        raise UsageError("the snapshot is damaged; take it again")
    values: list[int] = []
    start = 0
    for count, bound in groups:
        width = _width(bound)
        end = start + count * width
        found = [int.from_bytes(body[at : at + width], "little") for at in range(start, end, width)]
        if max(found) >= bound:
            raise UsageError("the snapshot holds an impossible state; take it again")
        values += found
        start = end
    return values


def _width(bound: int) -> int:
    return max(1, ((bound - 1).bit_length() + 7) // 8)


def _checksum(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_CHECKSUM).digest()
