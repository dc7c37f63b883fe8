"""Specification of causal self-attention: settings, parameters and cost, without torch.

With tensor parallelism, q, k and v are column-parallel (ColwiseParallel in torch,
ColumnParallelLinear in Megatron) and the output projection is row-parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hlat.config.bounds import bounded
from hlat.config.components import get_spec, register_component
from hlat.model import rope_spec
from hlat.model.activation_spec import (
    ActivationLifetime,
    ActivationTensor,
    ExecutionSettings,
    KernelBackend,
    ParallelRegion,
)
from hlat.model.parameter_spec import (
    Initialization,
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class QKNormScope(Enum):
    """Elements over which QK-norm computes the mean square."""

    head = "head"
    """Each head separately, with one weight per element of a head (Qwen3, Gemma 3)."""
    projection = "projection"
    """All heads together, with one weight per output of the projection (OLMo 2)."""


class LayerType(Enum):
    """Positions that the attention of a layer attends to."""

    full = "full"
    """All earlier positions."""
    sliding = "sliding"
    """The last sliding_window positions, including the current one."""


@dataclass
class AttentionConfig:
    """Grouped-query attention; the numbers of heads are keys of `model`."""

    head_dim: int | None = bounded(None, min=1)
    """Size of one attention head; null: hidden_size / num_attention_heads."""
    scale: float | None = bounded(None, above=0, below=float("inf"))
    """Factor of the attention scores; null: 1 / sqrt(head_dim)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values (Qwen2)."""
    output_bias: bool = False
    """Add a bias to the output projection."""
    qk_norm: bool = False
    """Apply RMSNorm to queries and keys before the rotary embedding (arXiv 2010.04245)."""
    qk_norm_scope: QKNormScope = QKNormScope.head
    """Elements over which qk_norm computes the mean square."""
    sliding_window: int | None = bounded(None, min=1)
    """Positions that a sliding layer attends to, including the current one; null: no sliding
    layers."""
    layer_pattern: list[LayerType] = field(default_factory=list)
    """Type of each layer, repeated over the layers, such as [sliding,full]; empty: all layers are
    sliding if sliding_window is set, and full otherwise."""
    logit_softcap: float | None = bounded(None, above=0, below=float("inf"))
    """Limit the attention scores to this value by c * tanh(score / c) before masking (Gemma 2,
    arXiv 2408.00118); null: no limit."""
    sinks: bool = False
    """Add a learned logit per query head to the denominator of the softmax (arXiv 2309.17453,
    gpt-oss)."""
    kind: str = "softmax"
    """Kind of attention: softmax, or one of an extension."""


def get_layer_type(model: ModelConfig, layer: int) -> LayerType:
    """Return the type of a 0-based decoder layer."""
    attention = model.attention
    if attention.layer_pattern:
        return attention.layer_pattern[layer % len(attention.layer_pattern)]
    return LayerType.full if attention.sliding_window is None else LayerType.sliding


def get_window(model: ModelConfig, layer: int) -> int | None:
    """Return the positions that a layer attends to; None: all earlier positions."""
    is_sliding = get_layer_type(model, layer) is LayerType.sliding
    return model.attention.sliding_window if is_sliding else None


class AttentionSpec:
    """Specification of grouped-query softmax attention; other kinds replace some methods."""

    def find_conflicts(self, model: ModelConfig) -> Iterator[str]:
        """Yield an error message for each pair of settings that conflict."""
        settings = model.attention
        has_sliding = LayerType.sliding in settings.layer_pattern
        if has_sliding and settings.sliding_window is None:
            yield (
                "model.attention.layer_pattern has sliding layers, and "
                "model.attention.sliding_window is null; set the number of positions, or use "
                "model.attention.layer_pattern=[full]"
            )
        if settings.layer_pattern and not has_sliding and settings.sliding_window is not None:
            yield (
                f"model.attention.sliding_window={settings.sliding_window} has no effect: "
                "model.attention.layer_pattern has no sliding layers; use null, or a pattern such "
                "as [sliding,full]"
            )

    def list_parameters(self, model: ModelConfig) -> tuple[ModuleParameter, ...]:
        """Return the parameters of the attention of one layer."""
        settings, hidden, head_dim = model.attention, model.hidden_size, model.head_dim
        num_groups = model.num_key_value_heads
        sizes = {"q": model.num_attention_heads, "k": num_groups, "v": num_groups}

        def project(kind: str, name: str, columns: tuple[int, ...]) -> ParameterSpec:
            is_bias = not columns
            return ParameterSpec(
                f"self_attn.{name}",
                (sizes[kind] * head_dim, *columns),
                ParameterRole.bias if is_bias else ParameterRole.matrix,
                ShardingRule.column,
                Initialization.zeros if is_bias else Initialization.normal,
                rows_per_head=head_dim,
            )

        def fuse(leaf: str, columns: tuple[int, ...]) -> ModuleParameter:
            specs = tuple(project(kind, f"{kind}_proj.{leaf}", columns) for kind in sizes)
            return ModuleParameter(f"self_attn.qkv_proj.{leaf}", specs, num_groups)

        parameters = [fuse("weight", (hidden,))]
        if settings.qkv_bias:
            parameters.append(fuse("bias", ()))
        if settings.qk_norm:
            parameters += [_build_qk_norm(model, kind, sizes[kind]) for kind in ("q", "k")]
        if settings.sinks:
            shape = (model.num_attention_heads,)
            role, column = ParameterRole.sink, ShardingRule.column
            sinks = ParameterSpec("self_attn.sinks", shape, role, column, Initialization.zeros)
            parameters.append(ModuleParameter("self_attn.sinks", (sinks,), num_groups))
        output = ParameterSpec(
            "self_attn.o_proj.weight",
            (hidden, model.num_attention_heads * head_dim),
            ParameterRole.residual,
            ShardingRule.row,
        )
        parameters.append(
            ModuleParameter("self_attn.o_proj.weight", (output,), num_column_groups=num_groups)
        )
        if settings.output_bias:
            bias = ParameterSpec(
                "self_attn.o_proj.bias",
                (hidden,),
                ParameterRole.bias,
                ShardingRule.replicated,  # added after the partial outputs are summed
                Initialization.zeros,
            )
            parameters.append(ModuleParameter("self_attn.o_bias", (bias,)))
        return tuple(parameters)

    def list_activations(
        self, model: ModelConfig, layer: int, execution: ExecutionSettings
    ) -> tuple[ActivationTensor, ...]:
        """Return the activations of the attention of a layer.

        The value is a view of the fused projection, so that all of it remains in memory. Queries
        and keys that are normalized or rotated are further tensors. The output of attention is the
        input of the output projection.
        """
        settings, shard = model.attention, ParallelRegion.tensor_parallel
        num_queries, num_keys = _count_local_elements(model, execution.tp)
        tensors = [
            ActivationTensor("input of q, k and v", model.hidden_size, ParallelRegion.column_input),
            ActivationTensor("q, k and v", num_queries + 2 * num_keys, shard),
            ActivationTensor("input of the output projection", num_queries, shard),
        ]
        if settings.qk_norm:
            tensors.append(_build_qk_norm_input(model, execution))
        if settings.qk_norm or rope_spec.has_rope(model, layer):
            name = "q and k after norm and rotation"
            tensors.append(ActivationTensor(name, num_queries + num_keys, shard))
        elif num_keys > model.head_dim and num_queries > num_keys:
            tensors.append(ActivationTensor("q of all groups", num_queries, shard))
        return (*tensors, *_list_kernel_activations(model, layer, execution))

    def list_shared_activations(
        self, model: ModelConfig, execution: ExecutionSettings
    ) -> tuple[ActivationTensor, ...]:
        """Return the activations of all layers: masks, or the first positions of documents."""
        if execution.kernels is KernelBackend.masked:
            windows = {get_window(model, layer) for layer in range(model.num_layers)}
            num_masks = sum(_needs_mask(window, execution) for window in windows)
            numel = num_masks * execution.sequence_length
            return (
                ActivationTensor(
                    "attention masks",
                    numel,
                    ParallelRegion.tensor_parallel,
                    ActivationLifetime.shared,
                ),
            )
        num_starts = int(execution.has_documents)
        name = "first position of the document"
        return (
            ActivationTensor(
                name,
                num_starts,
                ParallelRegion.tensor_parallel,
                ActivationLifetime.shared,
                itemsize=8,
            ),
        )

    def compute_score_flops_per_token(
        self, model: ModelConfig, layer: int, sequence_length: int
    ) -> float:
        """Return the FLOPs of scores and weighted values of a layer for one token, forward.

        A token attends to half of the sequence on average, or in a sliding layer to the window
        except at the start of the sequence: w - w^2 / (2 s) positions.
        """
        window = min(get_window(model, layer) or sequence_length, sequence_length)
        num_keys = window - window * window / (2 * sequence_length)
        return 4 * num_keys * model.num_attention_heads * model.head_dim


def _build_qk_norm_input(model: ModelConfig, execution: ExecutionSettings) -> ActivationTensor:
    """Return what QK-norm saves in addition to the fused projection.

    Queries of several groups are not contiguous in it, and are copied. A norm over all heads also
    copies the keys. If ranks have parts of the heads that are normalized together, the norm saves
    fp32 tensors before and after the multiplication by the inverse root mean square.
    """
    num_queries, num_keys = _count_local_elements(model, execution.tp)
    is_projection = model.attention.qk_norm_scope is QKNormScope.projection
    has_groups = num_keys > model.head_dim
    numel, itemsize = 0.0, None
    if is_projection and execution.tp > 1:
        num_tensors = 2 if has_groups or execution.compute_itemsize < 4 else 1
        numel, itemsize = num_tensors * (num_queries + num_keys), 4
    elif execution.saves_fp32_norm_inputs:
        numel, itemsize = num_queries + num_keys, 4
    elif has_groups and is_projection:
        numel = num_queries + num_keys
    elif has_groups and num_queries > num_keys:
        numel = num_queries
    return ActivationTensor(
        "input of QK-norm", numel, ParallelRegion.tensor_parallel, itemsize=itemsize
    )


def _list_kernel_activations(
    model: ModelConfig, layer: int, execution: ExecutionSettings
) -> tuple[ActivationTensor, ...]:
    """Return what the kernel of a device saves beyond its inputs and outputs.

    cpu and gpu: nothing, except for the output before FlexAttention's factor of sinks. masked: a
    mask needs a key and a value for each query head; soft-capped scores and sinks use separate
    operators in fp32. xla: separate operators; temporaries are the probabilities, their gradient
    and that of the scores.
    """
    settings, kernels, recomputed = (
        model.attention,
        execution.kernels,
        ActivationLifetime.recomputed,
    )
    num_queries, num_keys = _count_local_elements(model, execution.tp)
    num_scores = model.num_attention_heads / execution.tp * execution.sequence_length

    def build(
        name: str,
        numel: float,
        lifetime: ActivationLifetime = recomputed,
        itemsize: int | None = None,
    ) -> ActivationTensor:
        return ActivationTensor(name, numel, ParallelRegion.tensor_parallel, lifetime, itemsize)

    if kernels is KernelBackend.xla:
        itemsize = execution.softmax_itemsize
        return (
            build("attention probabilities", num_scores, ActivationLifetime.unfused),
            build("recomputed probabilities", num_scores, ActivationLifetime.workspace),
            build("gradients of scores", 2 * num_scores, ActivationLifetime.workspace, itemsize),
        )
    if kernels is KernelBackend.gpu and settings.sinks:
        return (build("output before the factor of sinks", num_queries),)
    if kernels is not KernelBackend.masked:
        return ()
    if settings.sinks or settings.logit_softcap is not None:
        num_tensors = 1 if settings.logit_softcap is None else 2
        return (
            build("scores and probabilities", num_tensors * num_scores, itemsize=4),
            build("q, k and v of each query head", 3 * num_queries, itemsize=4),
        )
    if _needs_mask(get_window(model, layer), execution) and num_keys < num_queries:
        return (build("key and value of each query head", 2 * num_queries),)
    return ()


def _needs_mask(window: int | None, execution: ExecutionSettings) -> bool:
    """Return True if attention is not only causal."""
    is_limited = window is not None and window < execution.sequence_length
    return execution.has_documents or is_limited


def _count_local_elements(model: ModelConfig, tp: int) -> tuple[float, int]:
    """Return the elements per token of the queries and of the keys of a tensor-parallel rank."""
    num_groups = -(-model.num_key_value_heads // tp)
    return model.num_attention_heads * model.head_dim / tp, num_groups * model.head_dim


def _build_qk_norm(model: ModelConfig, kind: str, num_heads: int) -> ModuleParameter:
    """Return the norm of queries or keys."""
    name, head_dim = f"self_attn.{kind}_norm.weight", model.head_dim
    init = Initialization.zeros if model.norm.zero_centered else Initialization.ones
    if model.attention.qk_norm_scope is QKNormScope.head:
        rule = ShardingRule.replicated_in_region
        spec = ParameterSpec(name, (head_dim,), ParameterRole.norm, rule, init)
        return ModuleParameter(name, (spec,))
    shape = (num_heads * head_dim,)
    spec = ParameterSpec(
        name, shape, ParameterRole.norm, ShardingRule.column, init, rows_per_head=head_dim
    )
    return ModuleParameter(name, (spec,), model.num_key_value_heads)


def get_attention_spec(model: ModelConfig) -> AttentionSpec:
    """Return the specification of a model's kind of attention."""
    spec: AttentionSpec = get_spec("model.attention", model.attention.kind)
    return spec


register_component("model.attention", "softmax", "Grouped-query attention.", AttentionSpec())
