"""A pseudorandom permutation of range(size) computed by a Feistel network.

Every rank, worker and resume must agree on the order of billions of documents. A keyed bijection
computes the i-th element in one function call, without memory, start-up cost or replay.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
"""With three rounds, neighboring elements of a million are visibly correlated; with four, two
samples of a few hundred elements are dependent; with six, tests find no dependence."""
MAX_SINGLE_WALKS = 8
"""Images outside of the range that are permuted again one by one, faster than as an array."""
MIN_HALF_BITS = 4
"""With fewer bits, the orders of a few documents are not equally probable."""

_UINT64_MASK = 0xFFFF_FFFF_FFFF_FFFF
_SHIFTS = 30, 27, 31
_MULTIPLIERS = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
# NumPy converts a Python integer in every operation, which takes as long as the operation
_ARRAY_SHIFTS = tuple(map(np.uint64, _SHIFTS))
_ARRAY_MULTIPLIERS = tuple(map(np.uint64, _MULTIPLIERS))


def _mix_bits(value: int) -> int:
    """Apply the finalizer of SplitMix64: every input bit affects every output bit."""
    value = value ^ (value >> _SHIFTS[0])
    value = value * _MULTIPLIERS[0] & _UINT64_MASK
    value = value ^ (value >> _SHIFTS[1])
    value = value * _MULTIPLIERS[1] & _UINT64_MASK
    return value ^ (value >> _SHIFTS[2])


def _mix_array(values: NDArray[np.uint64]) -> None:
    """Apply `_mix_bits` to an array in place; its products wrap at 64 bits."""
    values ^= values >> _ARRAY_SHIFTS[0]
    values *= _ARRAY_MULTIPLIERS[0]
    values ^= values >> _ARRAY_SHIFTS[1]
    values *= _ARRAY_MULTIPLIERS[1]
    values ^= values >> _ARRAY_SHIFTS[2]


class Permutation:
    """A bijection of range(size), selected by a key.

    A balanced Feistel network permutes the smallest range(4**k) that contains range(size). Results
    outside range(size) are permuted again until they are inside (cycle walking), which preserves
    bijectivity.
    """

    def __init__(self, size: int, key: Sequence[str | int]) -> None:
        """Derive the round keys from the key and the size, which is at least 1."""
        assert 1 <= size <= 1 << 62
        self.size = size
        self._half_bits = max(MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        seed = json.dumps([*key, size]).encode()
        digest = hashlib.blake2b(seed, digest_size=8 * NUM_ROUNDS).digest()
        self._round_keys = [
            int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)
        ]
        self._array_keys = np.array(self._round_keys, np.uint64)

    @overload
    def __call__(self, index: int) -> int: ...

    @overload
    def __call__(self, index: NDArray[np.integer[Any]]) -> NDArray[np.int64]: ...

    def __call__(self, index: int | NDArray[np.integer[Any]]) -> int | NDArray[np.int64]:
        """Return the image of an index of range(size), or of an array of them."""
        if isinstance(index, np.ndarray):
            return self._map_array(index)
        index = int(index)
        assert 0 <= index < self.size
        return self._walk(self._apply_feistel(index))

    def _map_array(self, index: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.size)
        image = self._apply_feistel_to_array(index.astype(np.uint64).ravel())
        outside = np.flatnonzero(image >= self.size)
        while outside.size > MAX_SINGLE_WALKS:
            walked = self._apply_feistel_to_array(image[outside])
            image[outside] = walked
            outside = outside[walked >= self.size]
        for position in outside.tolist():
            image[position] = self._walk(int(image[position]))
        return image.astype(np.int64).reshape(index.shape)

    def _walk(self, image: int) -> int:
        """Permute an image again until it is inside of range(size)."""
        while image >= self.size:
            image = self._apply_feistel(image)
        return image

    def _apply_feistel(self, value: int) -> int:
        left = value >> self._half_bits
        right = value & self._half_mask
        for round_key in self._round_keys:
            left, right = (
                right,
                left ^ (_mix_bits(right + round_key & _UINT64_MASK) & self._half_mask),
            )
        return (left << self._half_bits) | right

    def _apply_feistel_to_array(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half_bits, half_mask = np.uint64(self._half_bits), np.uint64(self._half_mask)
        left, right = values >> half_bits, values & half_mask
        for round_key in self._array_keys:
            mixed = right + round_key
            _mix_array(mixed)
            mixed &= half_mask
            mixed ^= left
            left, right = right, mixed
        image: NDArray[np.uint64] = (left << half_bits) | right
        return image
