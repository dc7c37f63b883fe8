"""Emulated stochastic rounding of fp32 tensors to bf16.

It is integer arithmetic on the bits of fp32 values, a few rows at a time in a scratch buffer that
fits a core's cache. The eager and the compiled implementation are bit-identical.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hlat.precision.random_bits import RandomBits
from hlat.precision.record_range import record_range

_CHUNK_NUMEL = {"cpu": 1 << 17}
"""Elements that a thread rounds or updates at a time, by device type; they fit its cache."""
_COMPILED_CHUNK_NUMEL = {"cpu": 1 << 18}
"""The same for compiled code, whose calls cost more."""
_MAX_CHUNK_NUMEL = 1 << 22
"""Elements at a time on other devices; bounds the scratch memory."""


@dataclass(frozen=True)
class ScratchBuffer:
    """fp32 matrices of one shape in one buffer; `bits` is the memory as int32 [n, rows, width]."""

    tensors: list[Tensor]
    bits: Tensor


class StochasticRounder:
    """Stochastic rounding with reusable scratch buffers, by eager operators or torch.compile.

    Constants are scalar tensors on the CPU, which torch passes to a kernel of any device by value.
    It would wrap a Python number in every operation, at a higher cost than the rest of a call.
    """

    def __init__(self, compile_backend: str | None = None) -> None:
        self._compile_backend = compile_backend
        self._memory: dict[str, Tensor] = {}
        self._buffers: dict[tuple[str, int, torch.Size], ScratchBuffer] = {}
        self._constants: dict[int, Tensor] = {}

    def copy_rounded_(self, target: Tensor, source: Tensor, random_bits: RandomBits) -> None:
        """Copy an fp32 tensor to a bf16 tensor of the same shape."""
        for rows, (target_rows, source_rows) in self.iter_chunks(target, source):
            buffer = self.get_buffer("rounded", 1, source_rows.shape, source_rows.device)
            buffer.tensors[0].copy_(source_rows)
            self.round_(buffer, random_bits, rows)
            target_rows.copy_(buffer.tensors[0])

    def add_rounded_(self, total: Tensor, summand: Tensor, random_bits: RandomBits) -> None:
        """Add a tensor to a bf16 tensor; the exact sum is rounded once."""
        for rows, (total_rows, summand_rows) in self.iter_chunks(total, summand):
            buffer = self.get_buffer("rounded", 1, summand_rows.shape, summand_rows.device)
            buffer.tensors[0].copy_(total_rows).add_(summand_rows)
            self.round_(buffer, random_bits, rows)
            total_rows.copy_(buffer.tensors[0])

    @record_range("rounding")
    def round_(self, buffer: ScratchBuffer, random_bits: RandomBits, rows: slice) -> None:
        """Round the tensors of a buffer in place to values of bf16, with the bits of some rows.

        A value is rounded up or down with a probability proportional to the distance: adding 16
        random bits to the 16 bits that bf16 lacks carries into the next value away from zero, and
        truncation moves towards zero. Values of bf16, zeros and infinities are unchanged; a value
        rounded beyond the largest is infinite. A NaN stays NaN in the first tensor and is
        undefined in the others: a NaN in a moment implies one in its weight, which stays.
        """
        row_keys = random_bits.row_keys[:, rows]
        if self._compile_backend is not None:
            _compile_round_bits_(self._compile_backend)(
                buffer.bits, row_keys, random_bits.column_keys
            )
            return
        # This NaN has zeros in the low mantissa bits, so that no carry turns it into a number
        infinity = float("inf")
        buffer.tensors[0].nan_to_num_(nan=float("nan"), posinf=infinity, neginf=-infinity)
        buffer.bits.add_(self.expand_random_bits(row_keys, random_bits.column_keys))
        buffer.bits.bitwise_and_(self._get_constant(-65536))

    def expand_random_bits(self, row_keys: Tensor, column_keys: Tensor) -> Tensor:
        """Return 16 random bits per element, int32 [n, rows, width], valid until the next call.

        They are the upper half of the product of two keys (multiplicative hashing: Dietzfelbinger
        et al., J. Algorithms 25, 1997), given as in RandomBits. Column keys are odd, so each
        element has every value for equally many keys of its row.
        """
        shape = torch.Size((row_keys.shape[1], column_keys.shape[1]))
        bits = self.get_buffer("random_bits", len(row_keys), shape, row_keys.device).bits
        torch.mul(row_keys, column_keys, out=bits)
        bits.bitwise_right_shift_(self._get_constant(16))
        return bits.bitwise_and_(self._get_constant(0xFFFF))

    def get_buffer(
        self, slot: str, num_tensors: int, shape: torch.Size, device: torch.device
    ) -> ScratchBuffer:
        """Return a buffer that is valid until the next call for the same slot.

        Memory is reused: newly allocated memory would be paged in at each call.
        """
        if (slot, num_tensors, shape) not in self._buffers:
            numel = num_tensors * shape.numel()
            if slot not in self._memory or self._memory[slot].numel() < numel:
                self._memory[slot] = torch.empty(numel, device=device)
                self._buffers.clear()  # they refer to the memory that was replaced
            memory = self._memory[slot][:numel].view(num_tensors, *shape)
            buffer = ScratchBuffer([*memory], memory.view(torch.int32))
            self._buffers[slot, num_tensors, shape] = buffer
        return self._buffers[slot, num_tensors, shape]

    def iter_chunks(self, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Iterate over chunks of rows of tensors of one shape: the rows and views of them."""
        return iter_row_chunks(tensors, is_compiled=self._compile_backend is not None)

    def _get_constant(self, value: int) -> Tensor:
        if value not in self._constants:
            self._constants[value] = torch.tensor(value, dtype=torch.int32, device="cpu")
        return self._constants[value]


@cache
def _compile_round_bits_(backend: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    return torch.compile(_round_bits_, fullgraph=True, dynamic=True, backend=backend)


def _round_bits_(bits: Tensor, row_keys: Tensor, column_keys: Tensor) -> None:
    """Apply `StochasticRounder.round_` to the bits of fp32 values in place.

    The argument is int32 because TorchInductor does not vectorize a view as another dtype.
    """
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    carried = bits + (((row_keys * column_keys) >> 16) & 0xFFFF)
    bits.copy_(torch.where(is_nan, bits | 0x400000, carried) & -65536)


def iter_row_chunks(
    tensors: Sequence[Tensor], is_compiled: bool = False
) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Iterate over chunks of rows of tensors of one shape: the rows and views of them."""
    if tensors[0].numel() == 0:  # the shard of a rank that has no row of a small parameter
        return iter(())
    matrices = [one if one.dim() == 2 else one.view(1, -1) for one in tensors]
    num_rows, width = matrices[0].shape
    chunk_numels = _COMPILED_CHUNK_NUMEL if is_compiled else _CHUNK_NUMEL
    per_thread = chunk_numels.get(tensors[0].device.type)
    numel = per_thread * torch.get_num_threads() if per_thread else _MAX_CHUNK_NUMEL
    step = max(1, numel // width)
    chunks = zip(*(torch.split(matrix, step) for matrix in matrices), strict=True)
    return zip((slice(i, i + step) for i in range(0, num_rows, step)), chunks, strict=True)
