"""Specification of a parameter: name, shape, initialization and sharding, without torch.

A canonical parameter has the name and shape of Hugging Face's state_dict. Checkpoints, initial
values and random bits are keyed by canonical names. A module parameter is the tensor of a torch
module; it consists of rows of one or more canonical parameters.
"""

import math
from dataclasses import dataclass
from enum import Enum


class ParameterRole(Enum):
    """Role of a parameter in the model."""

    matrix = "matrix"
    """Weight of a linear layer inside of a decoder layer."""
    residual = "residual"
    """Matrix that writes to the residual stream (o_proj, down_proj); scaled_init applies."""
    embedding = "embedding"
    """Token embedding."""
    head = "head"
    """Output head."""
    norm = "norm"
    """Weight of a norm."""
    bias = "bias"
    """Bias of a linear layer."""
    sink = "sink"
    """Attention sinks, one logit per query head."""
    router = "router"
    """Router of a mixture of experts, one row per expert."""


class Initialization(Enum):
    """Distribution of the initial values."""

    normal = "normal"
    """Normal with model.init_std, scaled by model.scaled_init if the role is residual."""
    ones = "ones"
    """Ones."""
    zeros = "zeros"
    """Zeros."""


class ShardingRule(Enum):
    """How a parameter is sharded over tensor-parallel ranks, and which ranks sum its gradient.

    Column and row parallelism are Megatron's (arXiv 1909.08053, section 3; sequence parallelism:
    2205.05198). A tensor-parallel region starts before a column-parallel weight and ends after a
    row-parallel weight.
    """

    vocabulary = "vocabulary"
    """Sharded over rows, one per token. If the ranks do not divide the rows, the last shard is
    shorter or padded with rows that are never read."""
    column = "column"
    """Sharded over rows of the weight (output features) or elements of a vector: q, k, v by whole
    heads, gate and up by the same features. Key/value heads are replicated if there are fewer heads
    than ranks; their gradients are summed over the ranks that share a head."""
    row = "row"
    """Sharded over columns of the weight (input features); partial outputs are all-reduced."""
    replicated = "replicated"
    """Replicated and applied outside of tensor-parallel regions. Under sequence parallelism each
    rank computes the gradient from its shard of the tokens, so the gradient is all-reduced."""
    replicated_in_region = "replicated_in_region"
    """Replicated and applied inside of a tensor-parallel region, to a rank's heads or to partial
    outputs. Each rank computes a part of the gradient, so the gradient is always all-reduced."""

    def is_summed_over_tp(self, sequence_parallel: bool) -> bool:
        """Return True if the gradient is the sum over all tensor-parallel ranks."""
        if self is ShardingRule.replicated:
            return sequence_parallel
        return self is ShardingRule.replicated_in_region

    @property
    def is_replicated(self) -> bool:
        """True if all tensor-parallel ranks have the full parameter."""
        return self in (ShardingRule.replicated, ShardingRule.replicated_in_region)


@dataclass(frozen=True)
class ParameterSpec:
    """Specification of one canonical parameter of the full model.

    Attributes:
        name: Canonical name, such as `model.layers.0.mlp.down_proj.weight`.
        shape: Global shape; matrices are [out, in] as in torch.nn.Linear.
        role: Role in the model.
        sharding: Sharding over tensor-parallel ranks.
        init: Distribution of the initial values.
        layer: 0-based decoder layer; None outside of the layers.
        rows_per_head: Rows that a column-parallel shard keeps together.
        token_fraction: Fraction of the tokens that the weight is applied to, below 1 in experts.
    """

    name: str
    shape: tuple[int, ...]
    role: ParameterRole
    sharding: ShardingRule
    init: Initialization = Initialization.normal
    layer: int | None = None
    rows_per_head: int = 1
    token_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.init is Initialization.normal and len(self.shape) != 2:
            raise ValueError(
                f"{self.name} of shape {self.shape} has normal initial values, which need a matrix;"
                " use Initialization.ones or Initialization.zeros"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def compute_local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape of one tensor-parallel shard; the largest if shards differ.

        A shard has at least one head: with fewer heads than ranks, heads are replicated. The
        vocabulary is padded to a multiple of tp.
        """
        num_rows, *columns = self.shape
        if self.sharding.is_replicated:
            return self.shape
        if self.sharding is ShardingRule.row:
            return (num_rows, _ceil_div(columns[0], tp))
        num_heads = num_rows // self.rows_per_head
        return (_ceil_div(num_heads, tp) * self.rows_per_head, *columns)

    def compute_local_numel(self, tp: int) -> int:
        """Return the number of elements of `compute_local_shape`."""
        return math.prod(self.compute_local_shape(tp))


@dataclass(frozen=True)
class ExpertIndex:
    """Index of an expert among the experts of its layer.

    Attributes:
        index: 0-based index.
        num_experts: Experts of the layer.
    """

    index: int
    num_experts: int

    def is_local(self, ep: int, rank: int) -> bool:
        """Return True if an expert-parallel rank has the expert."""
        return self.index in list_local_experts(self.num_experts, ep, rank)


def list_local_experts(num_experts: int, ep: int, rank: int) -> range:
    """Return the experts of an expert-parallel rank.

    Ranks have consecutive experts. If ep does not divide the experts, later ranks have one more.
    """
    return range(rank * num_experts // ep, (rank + 1) * num_experts // ep)


@dataclass(frozen=True)
class BufferSpec:
    """Specification of a canonical buffer: fp32 state that the optimizer does not train.

    Every rank with the module has the full buffer.

    Attributes:
        name: Canonical name, such as `model.layers.0.mlp.gate.e_score_correction_bias`.
        shape: Shape.
        initial_value: Initial value of all elements.
        changes_outputs: True if the outputs of the model depend on values other than the initial.
        key: Key of the setting that adds the buffer.
    """

    name: str
    shape: tuple[int, ...]
    initial_value: float
    changes_outputs: bool
    key: str


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a canonical parameter, or elements of a vector.

    `is_shared` is True for rows of a shard that other tensor-parallel ranks also have, because
    there are fewer key/value heads than ranks.
    """

    name: str
    start: int
    num_rows: int
    is_shared: bool = False


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter of a torch module, made of canonical rows.

    Attributes:
        name: Name in the module, such as `layers.0.self_attn.qkv_proj.weight`.
        specs: Canonical parameters that it consists of, with the same sharding.
        num_groups: The rows are this many groups, each with an equal part of every canonical
            parameter in turn. A tensor-parallel shard consists of whole groups, or, with more ranks
            than groups, of some query heads of a group and its key and value.
        num_column_groups: The same for the columns of a row-parallel weight, which are the outputs
            of a column-parallel weight.
        region: Module that is the tensor-parallel region of the weight; None: the region starts or
            ends at the module of the weight.
        expert: Expert that the weight belongs to, which one expert-parallel rank of several has;
            None: all of them have the weight.
    """

    name: str
    specs: tuple[ParameterSpec, ...]
    num_groups: int = 1
    num_column_groups: int = 1
    region: str | None = None
    expert: ExpertIndex | None = None

    @property
    def sharding(self) -> ShardingRule:
        """Sharding over tensor-parallel ranks."""
        return self.specs[0].sharding

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unsharded tensor."""
        return (sum(spec.shape[0] for spec in self.specs), *self.specs[0].shape[1:])

    @property
    def rows(self) -> tuple[RowRange, ...]:
        """All canonical rows in order."""
        groups = range(self.num_groups)
        return tuple(row_range for group in groups for row_range in self.list_group_rows(group))

    def list_group_rows(
        self, group: int, num_parts: int = 1, part: int = 0
    ) -> tuple[RowRange, ...]:
        """Return the canonical rows of a group; of `num_parts` ranks that share it, those of one.

        The heads of each canonical parameter are divided among the ranks if possible, and
        replicated otherwise.
        """
        row_ranges = []
        for spec in self.specs:
            num_rows = spec.shape[0] // self.num_groups
            is_shared = (num_rows // spec.rows_per_head) % num_parts > 0
            size = num_rows if is_shared else num_rows // num_parts
            start = group * num_rows + (0 if is_shared else part * size)
            row_ranges.append(RowRange(spec.name, start, size, is_shared))
        return tuple(row_ranges)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
