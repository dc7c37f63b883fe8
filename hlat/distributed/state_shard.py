"""Slices of canonical tensors that engines pass to the checkpoint store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlat.distributed.tensor_slice import TensorSlice

if TYPE_CHECKING:
    import torch

BUFFERS = "buffers"
"""Kind of state that the optimizer does not train and evaluations need beside the weights."""


@dataclass(frozen=True)
class StateShard:
    """Slice of one state tensor.

    Attributes:
        name: Kind and canonical name, such as `weights/model.norm.weight` or
            `exp_avg/lm_head.weight`.
        shape: Global shape of the canonical tensor, the same under every layout.
        tensor: View of the engine's memory with prod(size) elements in row-major order of the
            slice, of any shape and strides. The store reads it to save and writes it to load.
        is_main_replica: True if this process saves the slice, as one of its replicas does.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: "torch.Tensor"
    is_main_replica: bool = True

    @property
    def tensor_slice(self) -> TensorSlice:
        """Position of the slice in the canonical tensor."""
        return TensorSlice(self.offset, self.size)
