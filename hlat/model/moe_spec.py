"""Specification of a mixture of experts: parameters and cost, without torch.

A canonical parameter belongs to one expert, under the names of Qwen3-MoE and OLMoE in safetensors
files. An expert is sharded over tensor-parallel ranks as a dense network is. The router is inside
of the tensor-parallel region: each rank has partial outputs of the experts, so its gradient of the
router is a part of the sum, and one all-reduce per layer sums the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hlat.config.components import register_component
from hlat.model.activation_spec import ActivationTensor, ExecutionSettings, ParallelRegion
from hlat.model.mlp_spec import (
    BalanceScope,
    MLPSpec,
    MoEConfig,
    RouterScoring,
    StatisticsSize,
    StepMetricValue,
    list_network_activations,
    list_network_parameters,
)
from hlat.model.parameter_spec import (
    BufferSpec,
    ExpertIndex,
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

BIAS_NAME = "e_score_correction_bias"
"""Name of the router's bias, as in transformers."""
LOAD_NAME = "previous_load"
"""Name of the selections of each expert in the previous step, over their mean."""
_MAX_LOADS = 1024
"""Experts of all layers up to which metrics contain the load of each."""


class MoESpec(MLPSpec):
    """Specification of a mixture of experts."""

    def find_conflicts(self, model: ModelConfig) -> Iterator[str]:
        """Yield an error message for each pair of settings that conflict."""
        moe, key = model.mlp.moe, "model.mlp.moe"
        if not list_sparse_layers(model):
            yield (
                f"{key}.num_dense_layers={moe.num_dense_layers} and {key}.every={moe.every} leave "
                f"no layer with experts of model.num_layers={model.num_layers}; reduce one of them"
            )
        if moe.balance_scope is not BalanceScope.sequence and not moe.balance_loss:
            yield (
                f"{key}.balance_scope={moe.balance_scope.value} has no effect with "
                f"{key}.balance_loss=0; set a weight such as 0.01"
            )
        if moe.shared_gate and moe.shared_size is None:
            yield f"{key}.shared_gate=true has no effect without {key}.shared_size; set it"
        if moe.num_groups < 1:  # its bounds are checked elsewhere
            return
        if moe.num_experts % moe.num_groups:
            yield (
                f"{key}.num_groups={moe.num_groups} does not divide {key}.num_experts="
                f"{moe.num_experts}; use a divisor"
            )
            return
        if moe.groups_per_token > moe.num_groups:
            yield (
                f"{key}.groups_per_token={moe.groups_per_token} exceeds {key}.num_groups="
                f"{moe.num_groups}; use at most {moe.num_groups}"
            )
            return
        group_size = moe.num_experts // moe.num_groups
        if moe.num_groups > 1 and moe.scoring is RouterScoring.sigmoid and group_size < 2:
            yield (
                f"{key}.num_groups={moe.num_groups} leaves groups of one expert, and sigmoid "
                f"scores rate the two best; use at most {moe.num_experts // 2}"
            )
        limit = group_size * moe.groups_per_token
        if moe.experts_per_token > limit:
            groups = f" in {moe.groups_per_token} groups" if moe.num_groups > 1 else ""
            yield (
                f"{key}.experts_per_token={moe.experts_per_token} exceeds the {limit} "
                f"experts{groups} of {key}.num_experts={moe.num_experts}; use at most {limit}"
            )

    def count_experts(self, model: ModelConfig) -> int:
        """Return the experts of a layer that expert-parallel ranks can divide."""
        return model.mlp.moe.num_experts

    def get_layer_kind(self, model: ModelConfig, layer: int) -> str:
        """Return the model's kind, or dense in a layer without experts."""
        return model.mlp.kind if _is_sparse(model.mlp.moe, layer) else "dense"

    def count_expert_rows(self, model: ModelConfig) -> int:
        """Return the experts that a layer applies to a token."""
        return model.mlp.moe.experts_per_token

    def list_sharded_sizes(self, model: ModelConfig) -> dict[str, int]:
        """Return by key the sizes that tensor-parallel ranks divide."""
        moe, sizes = model.mlp.moe, super().list_sharded_sizes(model)
        if moe.intermediate_size is not None:
            if len(list_sparse_layers(model)) == model.num_layers:
                sizes = {}
            sizes["model.mlp.moe.intermediate_size"] = moe.intermediate_size
        if moe.shared_size is not None:
            sizes["model.mlp.moe.shared_size"] = moe.shared_size
        return sizes

    def list_parameters(self, model: ModelConfig) -> tuple[ModuleParameter, ...]:
        """Return the router and the experts of one layer."""
        moe = model.mlp.moe
        fraction = moe.experts_per_token / moe.num_experts
        name, shape = "mlp.gate.weight", (moe.num_experts, model.hidden_size)
        rule = ShardingRule.replicated_in_region
        router = ParameterSpec(name, shape, ParameterRole.router, rule)
        experts = (
            replace(parameter, expert=ExpertIndex(expert, moe.num_experts))
            for expert in range(moe.num_experts)
            for parameter in list_network_parameters(
                model, f"mlp.experts.{expert}", get_expert_size(model)
            )
        )
        return (
            ModuleParameter(name, (router,)),
            *(_build_expert_parameter(parameter, fraction) for parameter in experts),
            *_list_shared_parameters(model),
        )

    def list_buffers(self, model: ModelConfig) -> tuple[BufferSpec, ...]:
        """Return bias and load of the experts of one layer, as far as the settings have them."""
        moe, key = model.mlp.moe, "model.mlp.moe"
        shape, buffers = (moe.num_experts,), list[BufferSpec]()
        if moe.bias_update_rate:
            name = f"mlp.gate.{BIAS_NAME}"
            buffers.append(BufferSpec(name, shape, 0.0, True, f"{key}.bias_update_rate"))
        if uses_previous_load(moe):
            name = f"mlp.gate.{LOAD_NAME}"
            buffers.append(BufferSpec(name, shape, 1.0, False, f"{key}.balance_scope"))
        return tuple(buffers)

    def get_statistics_size(self, model: ModelConfig) -> StatisticsSize:
        """Return the size of the selections of each expert, of dropped ones, and of entropies."""
        return StatisticsSize(model.mlp.moe.num_experts + 1, 1)

    def compute_step_metrics(
        self, model: ModelConfig, counts: list[list[int]], sums: list[list[float]]
    ) -> dict[str, StepMetricValue]:
        """Return the entropy of the router, dropped selections, and loads of experts.

        A load is the number of selections over their mean. The violation of a layer is the maximum
        load - 1 (arXiv 2408.15664).
        """
        moe = model.mlp.moe
        selected = {layer: of_layer[:-1] for layer, of_layer in enumerate(counts) if any(of_layer)}
        if not selected:
            return {}
        num_selected = {layer: sum(rows) for layer, rows in selected.items()}
        loads = {
            layer: [row * moe.num_experts / num_selected[layer] for row in rows]
            for layer, rows in selected.items()
        }
        violations = {layer: max(of_layer) - 1 for layer, of_layer in loads.items()}
        entropies = [sums[n][0] * moe.experts_per_token / num_selected[n] for n in selected]
        metrics: dict[str, StepMetricValue] = {
            "router_entropy": sum(entropies) / len(entropies),
            "router_max_violation": max(violations.values()),
        }
        if moe.capacity_factor is not None:
            num_dropped = sum(counts[layer][-1] for layer in selected)
            metrics["router_dropped"] = num_dropped / sum(num_selected.values())
        layers = range(len(counts))
        metrics["router_violations"] = [_round(violations.get(layer)) for layer in layers]
        if moe.num_experts * len(selected) <= _MAX_LOADS:
            metrics["router_loads"] = [
                [round(load, 3) for load in loads[layer]] if layer in loads else None
                for layer in layers
            ]
        return metrics

    def list_activations(
        self, model: ModelConfig, execution: ExecutionSettings
    ) -> tuple[ActivationTensor, ...]:
        """Return the activations of a layer, with balanced experts."""
        moe, shard = model.mlp.moe, ParallelRegion.tensor_parallel
        num_rows = moe.experts_per_token * min(1.0, moe.capacity_factor or 1.0)
        size = get_expert_size(model) / execution.tp
        hidden = model.hidden_size
        inputs = [ActivationTensor("input of the experts", hidden, ParallelRegion.column_input)]
        if execution.compute_itemsize < 4:  # the router saves a copy, the shared network the input
            copy = ActivationTensor("fp32 input of the router", hidden, shard, itemsize=4)
            inputs = [copy] if moe.shared_size is None else [*inputs, copy]
        return (
            *inputs,
            ActivationTensor("probabilities of the router", moe.num_experts, shard, itemsize=4),
            ActivationTensor("indices of the rows", 3 * moe.experts_per_token, shard, itemsize=8),
            ActivationTensor("rows of the experts", num_rows * hidden, shard),
            ActivationTensor("outputs of the experts", num_rows * hidden, shard),
            *list_network_activations(model, size, num_rows),
            *_list_shared_activations(model, execution),
        )


def get_expert_size(model: ModelConfig) -> int:
    """Return the width of the hidden layer of an expert."""
    return model.mlp.moe.intermediate_size or model.intermediate_size


def uses_previous_load(moe: MoEConfig) -> bool:
    """Return True if the balance loss depends on the selections of the previous step."""
    return moe.balance_loss > 0 and moe.balance_scope is BalanceScope.previous_step


def compute_capacity(moe: MoEConfig, length: int) -> int:
    """Return the tokens of an expert in a training sequence, given moe.capacity_factor."""
    assert moe.capacity_factor is not None
    mean = length * moe.experts_per_token / moe.num_experts
    return math.ceil(round(moe.capacity_factor * mean, 6))  # 1.1 * 10 is above 11 in floating point


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def list_sparse_layers(model: ModelConfig) -> list[int]:
    """Return the 0-based indices of the layers with experts, for kinds with the settings of moe."""
    return [layer for layer in range(model.num_layers) if _is_sparse(model.mlp.moe, layer)]


def _is_sparse(moe: MoEConfig, layer: int) -> bool:
    return layer >= moe.num_dense_layers and (layer + 1) % moe.every == 0


def _build_expert_parameter(parameter: ModuleParameter, fraction: float) -> ModuleParameter:
    specs = tuple(replace(spec, token_fraction=fraction) for spec in parameter.specs)
    return replace(parameter, specs=specs, region="mlp")


def _list_shared_parameters(model: ModelConfig) -> Iterator[ModuleParameter]:
    """Yield the parameters of the network for all tokens."""
    moe = model.mlp.moe
    if moe.shared_size is None:
        return
    for parameter in list_network_parameters(model, "mlp.shared_expert", moe.shared_size):
        yield _build_expert_parameter(parameter, 1.0)
    if moe.shared_gate:
        name, rule = "mlp.shared_expert_gate.weight", ShardingRule.replicated_in_region
        gate = ParameterSpec(name, (1, model.hidden_size), ParameterRole.router, rule)
        yield ModuleParameter(name, (gate,))


def _list_shared_activations(
    model: ModelConfig, execution: ExecutionSettings
) -> Iterator[ActivationTensor]:
    """Yield the activations of the network for all tokens, besides its input."""
    moe, shard = model.mlp.moe, ParallelRegion.tensor_parallel
    if moe.shared_size is None:
        return
    yield from list_network_activations(model, moe.shared_size / execution.tp)
    if moe.shared_gate:
        yield ActivationTensor("output of the shared network", model.hidden_size, shard)


register_component(
    "model.mlp", "moe", "Networks that a router selects for each token.", MoESpec(), MoEConfig
)
