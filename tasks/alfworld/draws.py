"""Seeded drawing that depends on nothing but its key: not on the process, the hash seed or library internals."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
_BLOCK = 256


def stable_hash(*key: object) -> int:
    """A 128-bit number from the text of a key."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()[:16], "big")


class Draw:
    """A stream of choices. Only uniform doubles of PCG64 are used, whose values numpy keeps between versions.

    Args:
        *key: what the stream is for; equal keys give equal streams.
    """

    def __init__(self, *key: object) -> None:
        self._generator = np.random.Generator(np.random.PCG64(stable_hash(*key)))
        self._waiting: list[float] = []

    def unit(self) -> float:
        """A number in [0, 1)."""
        if not self._waiting:
            self._waiting = self._generator.random(_BLOCK).tolist()
            self._waiting.reverse()
        return self._waiting.pop()

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self.unit() < probability

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self.unit() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self.unit() * len(items))]

    def weighted(self, weights: Mapping[T, float]) -> T:
        """One of the keys, with the probability of its weight (in the mapping's order)."""
        left = self.unit() * sum(weights.values())
        item = None
        for item, weight in weights.items():
            left -= weight
            if left < 0:
                return item
        if item is None:
            raise ValueError("nothing to draw from")
        return item

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in random order."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.between(0, last)
            result[last], result[other] = result[other], result[last]
        return result
