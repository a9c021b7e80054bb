"""Chance for data: every draw is a hash of numbers, so it is the same on any machine, version and world size."""

import hashlib
import heapq
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def draw(*numbers: int) -> int:
    """64 bits that depend on `numbers` alone."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")


def draws(numbers: Iterable[int], *seed: int) -> NDArray[np.uint64]:
    """`draw(*seed, number)` for each of `numbers`."""
    start = f"({''.join(f'{s}, ' for s in seed)}"
    hashes = (hashlib.blake2b(f"{start}{number})".encode(), digest_size=8).digest() for number in numbers)
    return np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64)


def permutation(n: int, *seed: int) -> NDArray[np.int64]:
    """A permutation of range(n) [n]; a million in a second or two."""
    return np.argsort(draws(range(n), *seed), kind="stable")


def shuffled(n: int, *seed: int) -> list[int]:
    """`permutation` as a list."""
    return [int(i) for i in permutation(n, *seed)]


def chosen(items: Iterable[T], count: int, *seed: int) -> list[T]:
    """`count` of `items` (all, when there are fewer) in their own order; holds no more than `count` at once."""
    keyed = ((draw(*seed, i), i, item) for i, item in enumerate(items))
    picked = heapq.nsmallest(count, keyed, key=lambda k: k[:2])
    return [item for _, _, item in sorted(picked, key=lambda k: k[1])]
