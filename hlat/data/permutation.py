"""A shuffle of range(size) that is computed, not stored.

Corpora have billions of documents and every rank, worker and resume must agree on their order. A
keyed bijection needs no memory, no build at start-up and no replay: the i-th element is one
function call away.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
"""With three, neighbours among a million are visibly correlated; with four, two draws of a few
hundred still depend on each other; with six, nothing of the kind is found."""
LEAST_HALF_BITS = 4
"""On fewer bits a Feistel network reaches the orders of a handful of documents unevenly."""

_WORD = 0xFFFF_FFFF_FFFF_FFFF
_Words = TypeVar("_Words", int, NDArray[Any])


def _mix(word: _Words) -> _Words:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    word = word ^ (word >> 30)
    word = word * 0xBF58_476D_1CE4_E5B9 & _WORD
    word = word ^ (word >> 27)
    word = word * 0x94D0_49BB_1331_11EB & _WORD
    return word ^ (word >> 31)


class Permutation:
    """A bijection of range(size), chosen by a key.

    A balanced Feistel network permutes the smallest range of 4**k numbers that holds `size`; a
    result outside of range(size) is permuted again until it falls inside (cycle walking), which
    keeps the map one to one.
    """

    def __init__(self, size: int, key: Sequence[str | int]) -> None:
        """Derive the round keys.

        Args:
            size: Number of elements, at least 1.
            key: What the shuffle depends on, besides the size.
        """
        assert 1 <= size <= 1 << 62
        self.size = size
        self._half_bits = max(LEAST_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        seed = json.dumps([*key, size]).encode()
        digest = hashlib.blake2b(seed, digest_size=8 * NUM_ROUNDS).digest()
        self._round_keys = [
            int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)
        ]

    @overload
    def __call__(self, index: int) -> int: ...

    @overload
    def __call__(self, index: NDArray[np.integer[Any]]) -> NDArray[np.int64]: ...

    def __call__(self, index: int | NDArray[np.integer[Any]]) -> int | NDArray[np.int64]:
        """Map an index of range(size), or an array of them, to its image."""
        if isinstance(index, np.ndarray):
            return self._map_array(index)
        index = int(index)
        assert 0 <= index < self.size
        image = self._feistel(index)
        while image >= self.size:
            image = self._feistel(image)
        return image

    def _map_array(self, index: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.size)
        image = self._feistel(index.astype(np.uint64).ravel())
        outside = np.flatnonzero(image >= self.size)
        while outside.size:
            image[outside] = self._feistel(image[outside])
            outside = outside[image[outside] >= self.size]
        return image.astype(np.int64).reshape(index.shape)

    def _feistel(self, number: _Words) -> _Words:
        left = number >> self._half_bits
        right = number & self._half_mask
        for round_key in self._round_keys:
            left, right = right, left ^ (_mix(right + round_key & _WORD) & self._half_mask)
        return (left << self._half_bits) | right
