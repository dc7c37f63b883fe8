"""Specification of the tensors that components allocate per token, without torch.

Each component lists its activations in its file *_spec.py. The planner adds them up and contains no
size of a component. Sums that have one element per token or head, such as those of a norm or a
softmax, are not listed.
"""

from dataclasses import dataclass
from enum import Enum

from hlat.config.parallelism import ActivationCheckpointing


class KernelBackend(Enum):
    """Kernels of a device, which differ in what they save for the backward pass."""

    cpu = "cpu"
    """hlat's kernels of norms and attention."""
    gpu = "gpu"
    """torch's norms and fused attention, and FlexAttention."""
    masked = "masked"
    """torch's norms and fused attention, which reads a mask of queries over keys."""
    xla = "xla"
    """Separate operators, compiled by XLA."""


class ParallelRegion(Enum):
    """Where an activation is, which determines the tokens that a tensor-parallel rank has."""

    sequence_parallel = "sequence_parallel"
    """Outside of tensor-parallel regions: sequence parallelism shards the tokens."""
    column_input = "column_input"
    """Input of a column-parallel weight: all tokens. NxD saves the shard of `sequence_parallel` and
    gathers again."""
    tensor_parallel = "tensor_parallel"
    """Inside of a tensor-parallel region: all tokens. Elements are those of one rank."""


class ActivationLifetime(Enum):
    """When an activation is in memory, by mode of activation checkpointing."""

    saved = "saved"
    """Saved for backward; full checkpointing recomputes it."""
    recomputed = "recomputed"
    """Saved for backward; selective and full checkpointing recompute it."""
    unfused = "unfused"
    """Saved for backward without checkpointing; `workspace` contains what others recompute."""
    checkpoint = "checkpoint"
    """Input of a layer, saved by full checkpointing."""
    shared = "shared"
    """Input of all layers, saved once under every mode."""
    workspace = "workspace"
    """Temporary of the backward pass of one layer."""


_NONE, _SELECTIVE, _FULL = (
    ActivationCheckpointing.none,
    ActivationCheckpointing.selective,
    ActivationCheckpointing.full,
)
_SAVED_LIFETIMES = {
    _NONE: (
        ActivationLifetime.shared,
        ActivationLifetime.saved,
        ActivationLifetime.recomputed,
        ActivationLifetime.unfused,
    ),
    _SELECTIVE: (ActivationLifetime.shared, ActivationLifetime.saved),
    _FULL: (ActivationLifetime.shared, ActivationLifetime.checkpoint),
}
"""Activations that stay in memory until the backward pass of their layer."""
_TEMPORARY_LIFETIMES = {
    _NONE: (ActivationLifetime.workspace,),
    _SELECTIVE: (ActivationLifetime.workspace, ActivationLifetime.recomputed),
    _FULL: (ActivationLifetime.workspace, ActivationLifetime.recomputed, ActivationLifetime.saved),
}
"""Activations that exist during the backward pass of their layer only."""


@dataclass(frozen=True)
class ActivationTensor:
    """Tensor of a forward or backward pass.

    Attributes:
        name: Description.
        numel: Elements per token.
        region: Tokens that a rank has.
        lifetime: When it is in memory.
        itemsize: Bytes per element; None: those of the compute dtype.
    """

    name: str
    numel: float
    region: ParallelRegion
    lifetime: ActivationLifetime = ActivationLifetime.saved
    itemsize: int | None = None


@dataclass(frozen=True)
class ExecutionSettings:
    """Settings of a run that determine the activations of a rank.

    Attributes:
        kernels: Kernels of the device.
        checkpointing: Mode of activation checkpointing.
        tp: Tensor-parallel ranks.
        sequence_parallel: True if activations outside of tensor-parallel regions are sharded.
        sequence_length: Tokens per sequence.
        has_documents: True if attention is limited to the document of a token.
        compute_itemsize: Bytes per element of the compute dtype.
        norm_itemsize: The same in norms.
        softmax_itemsize: The same in the softmax of attention.
        loss_itemsize: The same in the loss.
    """

    kernels: KernelBackend
    checkpointing: ActivationCheckpointing
    tp: int
    sequence_parallel: bool
    sequence_length: int
    has_documents: bool
    compute_itemsize: int
    norm_itemsize: int
    softmax_itemsize: int
    loss_itemsize: int

    @property
    def saves_fp32_norm_inputs(self) -> bool:
        """True if norms save an fp32 copy of their input, as torch.nn.functional.rms_norm does."""
        is_wider = self.norm_itemsize > self.compute_itemsize
        return is_wider and self.kernels in (KernelBackend.gpu, KernelBackend.masked)

    def compute_saved_bytes(self, activations: tuple[ActivationTensor, ...]) -> float:
        """Return the bytes per token of a micro batch that a rank saves for the backward pass."""
        return self._compute_bytes(activations, _SAVED_LIFETIMES[self.checkpointing])

    def count_saved(self, activations: tuple[ActivationTensor, ...]) -> int:
        """Return the number of activations that are saved for the backward pass."""
        return sum(one.lifetime in _SAVED_LIFETIMES[self.checkpointing] for one in activations)

    def compute_temporary_bytes(self, activations: tuple[ActivationTensor, ...]) -> float:
        """Return the bytes per token that exist during the backward pass of the layer only."""
        return self._compute_bytes(activations, _TEMPORARY_LIFETIMES[self.checkpointing])

    def _compute_bytes(
        self, activations: tuple[ActivationTensor, ...], lifetimes: tuple[ActivationLifetime, ...]
    ) -> float:
        return sum(
            one.numel
            / self._count_token_shards(one.region)
            * (one.itemsize or self.compute_itemsize)
            for one in activations
            if one.lifetime in lifetimes
        )

    def _count_token_shards(self, region: ParallelRegion) -> int:
        """Return the number of ranks that the tokens of a region are sharded over."""
        is_sharded = region is ParallelRegion.sequence_parallel or (
            region is ParallelRegion.column_input and self.kernels is KernelBackend.xla
        )
        return self.tp if is_sharded and self.sequence_parallel else 1
