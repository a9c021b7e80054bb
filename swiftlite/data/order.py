"""Chance for data: every draw is a hash of numbers, so it is the same on any machine, version and world size."""

import hashlib
import heapq
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def draw(*numbers: int) -> int:
    """64 bits that depend on `numbers` alone."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")


def shuffled(n: int, *seed: int) -> list[int]:
    """A permutation of range(n)."""
    return sorted(range(n), key=lambda i: (draw(*seed, i), i))


def chosen(items: Iterable[T], count: int, *seed: int) -> list[T]:
    """`count` of `items` (all, when there are fewer) in their own order; holds no more than `count` at once."""
    keyed = ((draw(*seed, i), i, item) for i, item in enumerate(items))
    picked = heapq.nsmallest(count, keyed, key=lambda k: k[:2])
    return [item for _, _, item in sorted(picked, key=lambda k: k[1])]
