"""A text space for any Unicode string, and its place in Gymnasium's vector utilities.

Gymnasium's own `Text` wants a character set (a space is not in its default one), and its vector utilities need a
fixed charset table for shared memory. `Unicode` bounds only the length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, overload

import numpy as np
from gymnasium import Space
from gymnasium.vector import utils as vector_utils

_SAMPLE_ALPHABET = (
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!'\"<>/[]{}-_=\n\u00e9\u4e2d\U0001f642"
)


def find_surrogate(text: str) -> int:
    """Index of the first lone surrogate in `text`, or -1. Such a string cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return -1


class Unicode(Space[str]):
    """All Unicode strings of at most `max_length` code points; lone surrogates are not text and are refused.

    Args:
        max_length: greatest number of code points.
        seed: seed of the sampler.
    """

    def __init__(self, max_length: int, seed: int | np.random.Generator | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, not {max_length}")
        self.max_length = int(max_length)
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no flat numeric form."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random string of at most 32 characters (or `max_length`), ASCII with a little of everything else."""
        if mask is not None or probability is not None:
            raise ValueError("Unicode.sample takes no mask and no probability")
        length = int(self.np_random.integers(0, min(self.max_length, 32) + 1))
        return "".join(_SAMPLE_ALPHABET[i] for i in self.np_random.integers(0, len(_SAMPLE_ALPHABET), length))

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string that fits and can be encoded as UTF-8."""
        return isinstance(x, str) and len(x) <= self.max_length and (x.isascii() or find_surrogate(x) < 0)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """Strings are JSON already."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """Inverse of `to_jsonable`."""
        return [str(text) for text in sample_n]

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and self.max_length == other.max_length

    def __hash__(self) -> int:
        return hash(("Unicode", self.max_length))


# Gymnasium batches any space as a tuple, so only shared memory has to be taught: a string is its UTF-8 bytes
# beside a length.


class _SharedText:
    """Shared memory for the strings of `n` environments: lengths in bytes and UTF-8 bytes."""

    def __init__(self, n: int, capacity: int, ctx: BaseContext) -> None:
        self.n = n
        self.capacity = capacity
        self.lengths = ctx.Array(ctypes.c_int64, n, lock=False)
        self.data: Any = ctx.Array(ctypes.c_char, n * capacity, lock=False)


@vector_utils.create_shared_memory.register(Unicode)
def _create_shared_memory(space: Unicode, n: int = 1, ctx: Any = None) -> _SharedText:
    import multiprocessing

    return _SharedText(n, 4 * space.max_length, ctx or multiprocessing.get_context())


@vector_utils.write_to_shared_memory.register(Unicode)
def _write(space: Unicode, index: int, value: str, shared: _SharedText) -> None:
    surrogate = find_surrogate(value)
    if surrogate >= 0:
        raise ValueError(
            f"observation has a lone surrogate at index {surrogate}, which is not text; "
            "decode the source with errors='replace' before returning it"
        )
    data = value.encode("utf-8")
    if len(data) > shared.capacity:
        raise ValueError(f"observation of {len(value)} characters exceeds {space}; cut it before returning it")
    start = index * shared.capacity
    memoryview(shared.data).cast("B")[start : start + len(data)] = data
    shared.lengths[index] = len(data)


class _SharedTexts(Sequence[str]):
    """A live view of the shared strings.

    Gymnasium reads shared memory once, when the vector environment is made, and relies on the result being a view;
    what it hands out at each step is a deep copy, unless it was made with copy=False.
    """

    def __init__(self, shared: _SharedText) -> None:
        self._shared = shared

    def __len__(self) -> int:
        return self._shared.n

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        number = range(len(self))[index]
        start = number * self._shared.capacity
        view = memoryview(self._shared.data).cast("B")
        return bytes(view[start : start + self._shared.lengths[number]]).decode("utf-8")

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return self[:]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


@vector_utils.read_from_shared_memory.register(Unicode)
def _read(space: Unicode, shared: _SharedText, n: int = 1) -> _SharedTexts:
    return _SharedTexts(shared)
