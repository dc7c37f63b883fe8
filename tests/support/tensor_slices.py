"""Coverage of a tensor by slices."""

from collections.abc import Sequence

import numpy as np

from hlat.distributed.tensor_slice import TensorSlice, is_exact_cover


def is_partition(slices: Sequence[TensorSlice], shape: tuple[int, ...]) -> bool:
    """Return True if `slices` cover each element of a tensor exactly once."""
    if not all(len(part.offset) == len(part.size) == len(shape) for part in slices):
        return False
    offsets, sizes = (
        np.array([getattr(part, key) for part in slices], np.int64).reshape(len(slices), len(shape))
        for key in ("offset", "size")
    )
    return is_exact_cover(offsets, sizes, shape)
