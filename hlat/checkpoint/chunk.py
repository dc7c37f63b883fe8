"""The unit that engines hand to the store: a slice of a canonical tensor, wherever it lies."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Chunk:
    """A slice of one tensor of the state.

    Attributes:
        name: Kind and canonical name, such as `weights/model.norm.weight` or
        `exp_avg/lm_head.weight`.
        shape: Global shape of the canonical tensor, the same under every layout.
        offset: Where this slice begins, per dimension.
        size: Extent of this slice, per dimension.
        tensor: The values: a view into the engine's memory with prod(size) elements in the slice's
            row-major order, of any shape and strides. The store reads it to save and copies into it
            to restore.
        saved: Whether this process saves it; of copies of a slice, one is.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: "torch.Tensor"
    saved: bool = True
