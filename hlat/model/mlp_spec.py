"""Specification of the feed-forward network: settings, parameters and cost, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from hlat.config.bounds import bounded
from hlat.config.components import get_spec, register_component
from hlat.model.activation_spec import (
    ActivationLifetime,
    ActivationTensor,
    ExecutionSettings,
    ParallelRegion,
)
from hlat.model.parameter_spec import (
    BufferSpec,
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class Activation(Enum):
    """Nonlinearity of the feed-forward network."""

    swiglu = "swiglu"
    """silu(gate) * up (arXiv 2002.05202)."""
    geglu = "geglu"
    """gelu(gate) * up with the tanh approximation of GELU (Gemma)."""
    relu2 = "relu2"
    """relu(x)^2 without gate (arXiv 2109.08668)."""
    gelu = "gelu"
    """gelu(x) without gate, with the tanh approximation (GPT-2)."""

    @property
    def is_gated(self) -> bool:
        """True if a second projection, the gate, multiplies the first."""
        return self in (Activation.swiglu, Activation.geglu)


_NUM_TEMPORARIES = {
    Activation.swiglu: 7,
    Activation.geglu: 7,
    Activation.relu2: 4,
    Activation.gelu: 2,
}
"""Temporaries of the backward pass, in tensors of intermediate_size elements. swiglu and geglu:
gradients of the product, of gate and of up, copies of gate and its activation, and the two
gradients concatenated. relu2: gradients of the square and of relu(x), 2 relu(x) and, with selective
checkpointing, relu(x). gelu: both gradients."""


class RouterScoring(Enum):
    """Scores of the experts, from the logits of the router."""

    softmax = "softmax"
    """Softmax over all experts (Mixtral, Qwen3-MoE, OLMoE)."""
    sigmoid = "sigmoid"
    """Sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437)."""


class BalanceScope(Enum):
    """Tokens whose selections weight the balance loss of a sequence."""

    sequence = "sequence"
    """Those of the sequence itself (DeepSeek-V3); no layout changes the loss."""
    previous_step = "previous_step"
    """Those of the global batch of the previous step; no layout changes the loss. The first step
    has balanced experts."""
    micro_batch = "micro_batch"
    """Those of the micro batch of a data-parallel rank, as in transformers: the loss depends on
    batch.micro_batch_size and parallelism.dp. For comparisons."""


@dataclass
class MoEConfig:
    """Mixture of experts (arXiv 1701.06538): a router selects networks for each token."""

    num_experts: int = bounded(8, min=1, max=10_000)
    """Networks of a layer."""
    experts_per_token: int = bounded(2, min=1)
    """Networks that the router selects for a token, those of the highest score."""
    intermediate_size: int | None = bounded(None, min=1)
    """Width of the hidden layer of an expert; null: model.intermediate_size."""
    normalize_top_k: bool = True
    """Divide the scores of the selected experts by their sum. For softmax scores this is the same
    as a softmax over the logits of these experts only."""
    scoring: RouterScoring = RouterScoring.softmax
    """Scores of the experts."""
    routed_scale: float = bounded(1.0, above=0)
    """Factor of the sum of the selected experts (2.5 in DeepSeek-V3)."""
    num_groups: int = bounded(1, min=1)
    """Groups of consecutive experts; the router selects experts of some groups only."""
    groups_per_token: int = bounded(1, min=1)
    """Groups that the router selects for a token. The score of a group is that of its best expert
    with softmax (DeepSeek-V2, arXiv 2405.04434), and the sum of its two best with sigmoid
    (DeepSeek-V3)."""
    shared_size: int | None = bounded(None, min=1)
    """Width of the hidden layer of a network for all tokens, whose output is added to that of the
    selected experts (DeepSeekMoE, arXiv 2401.06066); null: none."""
    shared_gate: bool = False
    """Multiply the output of this network by the sigmoid of a linear function (Qwen2-MoE)."""
    balance_loss: float = bounded(0.0, min=0, below=float("inf"))
    """Weight of the loss that balances the experts: the number of experts times the sum over
    experts of their share of the selections times their mean score in a sequence (DeepSeek-V3,
    equations 17 to 20); 1 for balanced experts. Gradients contain it, logged losses do not."""
    balance_scope: BalanceScope = BalanceScope.sequence
    """Tokens of the selections in the balance loss."""
    z_loss: float = bounded(0.0, min=0, below=float("inf"))
    """Weight of the square of log(sum(exp(logits))) of the router (ST-MoE, arXiv 2202.08906,
    equation 5). Gradients contain it, logged losses do not."""
    bias_update_rate: float = bounded(0.0, min=0, below=float("inf"))
    """Change of a bias of each expert after a step, towards balanced loads of the global batch: the
    router selects by score plus bias, and weights by score (DeepSeek-V3, arXiv 2408.15664). 0: no
    bias; 0.001 in DeepSeek-V3."""
    capacity_factor: float | None = bounded(None, above=0, below=float("inf"))
    """Limit of the tokens of an expert in each training sequence, as a multiple of their mean
    number; an expert drops later tokens (Switch Transformer, arXiv 2101.03961, equation 3).
    Evaluation and generation drop none. null: no limit."""
    num_dense_layers: int = bounded(0, min=0)
    """First layers with a dense network of model.intermediate_size instead of experts
    (first_k_dense_replace of DeepSeek-V3)."""
    every: int = bounded(1, min=1)
    """Distance of layers with experts: layer i, from 0, has them if this number divides i + 1, and
    has a dense network otherwise (decoder_sparse_step of Qwen3-MoE)."""
    upcycling_noise: float | None = bounded(None, min=0, below=float("inf"))
    """Standard deviation of the relative noise in the experts, which are copies of the network of
    the dense model in model.init_from (sparse upcycling, arXiv 2212.05055). 0: exact copies; null:
    model.init_from, if set, has experts."""


@dataclass
class MLPConfig:
    """Feed-forward network; its width is model.intermediate_size."""

    activation: Activation = Activation.swiglu
    """Nonlinearity, with or without gate."""
    kind: str = "dense"
    """Kind of network: dense, moe (mixture of experts), or one of an extension."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts and router of the kind moe."""


StepMetricValue = float | list[float | None] | list[list[float] | None]
"""Metric of a step: a number, or one or several for each layer, null for layers without it."""


class StatisticsSize(NamedTuple):
    """Number of integer counts and of sums of a layer."""

    num_counts: int
    num_sums: int


class MLPSpec:
    """Specification of a dense network; other kinds replace some methods."""

    def find_conflicts(self, model: ModelConfig) -> Iterator[str]:
        """Yield an error message for each pair of settings that conflict."""
        yield from ()

    def count_experts(self, model: ModelConfig) -> int:
        """Return the experts of a layer that expert-parallel ranks divide; 0 if it has none."""
        return 0

    def get_layer_kind(self, model: ModelConfig, layer: int) -> str:
        """Return the kind of network in a layer, by its 0-based index."""
        return model.mlp.kind

    def count_expert_rows(self, model: ModelConfig) -> int:
        """Return the experts that a layer applies to a token; 0 if it has none."""
        return 0

    def list_sharded_sizes(self, model: ModelConfig) -> dict[str, int]:
        """Return by key the sizes that tensor-parallel ranks divide."""
        return {"model.intermediate_size": model.intermediate_size}

    def list_parameters(self, model: ModelConfig) -> tuple[ModuleParameter, ...]:
        """Return the parameters of the feed-forward network of one layer."""
        return list_network_parameters(model, "mlp", model.intermediate_size)

    def list_buffers(self, model: ModelConfig) -> tuple[BufferSpec, ...]:
        """Return the buffers of the feed-forward network of one layer."""
        return ()

    def get_statistics_size(self, model: ModelConfig) -> StatisticsSize | None:
        """Return the number of statistics of a layer over a step; None without any."""
        return None

    def compute_step_metrics(
        self, model: ModelConfig, counts: list[list[int]], sums: list[list[float]]
    ) -> dict[str, StepMetricValue]:
        """Return metrics of a step from the statistics of each layer over the global batch.

        The counts of a layer without statistics are zero.
        """
        return {}

    def list_activations(
        self, model: ModelConfig, execution: ExecutionSettings
    ) -> tuple[ActivationTensor, ...]:
        """Return the activations of a layer."""
        return (
            ActivationTensor(
                "input of the first projections", model.hidden_size, ParallelRegion.column_input
            ),
            *list_network_activations(model, model.intermediate_size / execution.tp),
        )


def compute_block_size(intermediate_size: int, num_heads: int) -> int:
    """Return the rows per block of gate_up_proj, which alternates gate and up blocks.

    A tensor-parallel degree divides both the query heads and I, so gcd(I, heads) block pairs are
    the longest blocks of which each shard has complete pairs. Long blocks keep the result of SwiGLU
    contiguous; with blocks of one row it takes twice as long on a CPU.
    """
    return intermediate_size // math.gcd(intermediate_size, num_heads)


def list_network_parameters(
    model: ModelConfig, path: str, intermediate_size: int
) -> tuple[ModuleParameter, ...]:
    """Return the parameters of one network, given by the path of its module."""
    hidden, matrix = model.hidden_size, ParameterRole.matrix
    num_blocks = math.gcd(intermediate_size, model.num_attention_heads)
    shape, rule = (intermediate_size, hidden), ShardingRule.column
    up = ParameterSpec(f"{path}.up_proj.weight", shape, matrix, rule)
    first = ModuleParameter(f"{path}.up_proj.weight", (up,), num_blocks)
    if model.mlp.activation.is_gated:
        gate = ParameterSpec(f"{path}.gate_proj.weight", shape, matrix, rule)
        first = ModuleParameter(f"{path}.gate_up_proj.weight", (gate, up), num_blocks)
    name, role = f"{path}.down_proj.weight", ParameterRole.residual
    down = ParameterSpec(name, (hidden, intermediate_size), role, ShardingRule.row)
    return first, ModuleParameter(name, (down,))


def list_network_activations(
    model: ModelConfig, intermediate_size: float, num_networks: float = 1
) -> tuple[ActivationTensor, ...]:
    """Return the activations inside of the networks that are applied to a token.

    relu2 saves relu(x) instead of x, unless checkpointing saves x.

    Args:
        model: Model with the activation function.
        intermediate_size: Elements of the hidden layer of a network on a tensor-parallel rank.
        num_networks: Mean number of networks that are applied to a token.
    """
    activation, shard = model.mlp.activation, ParallelRegion.tensor_parallel
    numel = intermediate_size * num_networks
    num_inputs, num_temporaries = 1 + activation.is_gated, _NUM_TEMPORARIES[activation]
    return (
        ActivationTensor("input of the nonlinearity", num_inputs * numel, shard),
        ActivationTensor("input of the last projection", numel, shard),
        ActivationTensor(
            "temporaries", num_temporaries * numel, shard, ActivationLifetime.workspace
        ),
    )


def get_mlp_spec(model: ModelConfig) -> MLPSpec:
    """Return the specification of a model's kind of feed-forward network."""
    spec: MLPSpec = get_spec("model.mlp", model.mlp.kind)
    return spec


def get_layer_mlp_kind(model: ModelConfig, layer: int) -> str:
    """Return the kind of feed-forward network in a layer, by its 0-based index."""
    return get_mlp_spec(model).get_layer_kind(model, layer)


def get_layer_mlp_spec(model: ModelConfig, layer: int) -> MLPSpec:
    """Return the specification of the feed-forward network in a layer."""
    spec: MLPSpec = get_spec("model.mlp", get_layer_mlp_kind(model, layer))
    return spec


register_component("model.mlp", "dense", "One network for all tokens.", MLPSpec())
