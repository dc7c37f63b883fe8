"""Check that attention is causal and within its windows, and that other parts are causal.

The engine interface returns only losses. Therefore the loss is restricted to the targets up to some
position (each later token is a separate document, and first tokens are not counted), and the
tokens after that position are changed. The token at the position itself is replaced by one with the
same row in the head, which has the same probability unless an earlier position attends to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hlat.config.engine_capabilities import find_unsupported_settings
from hlat.config.model import ModelConfig
from hlat.config.run import Config
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.sampled_inputs import FullTensors, sample_batch, sample_weights
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.mlp_spec import get_mlp_spec
from hlat.model.parameter_spec import ParameterRole
from hlat.recovery.preflight_checks import format_first

_EQUIVALENT_TOKENS = (0, 1)
"""Tokens with the same row in the head."""

Tokens = NDArray[np.int32]


def check_causality(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that no loss depends on later tokens, another document or tokens before the windows."""
    faults: list[FaultLocation] = []
    paths: list[str] = []
    largest = 0.0
    for config in _build_attention_variants(harness):
        document_mask = config.data.document_mask
        paths.append("inside documents" if document_mask else "over all tokens")
        with harness.with_config(config) if harness.can_rebuild else nullcontext(harness) as other:
            weights = _build_weights(config)
            for layers in _list_layer_groups(config.model):
                leak = _measure_leak(other, _limit_attention(config.model, weights, layers), layers)
                largest = float(np.max([largest, leak]))
                if not leak <= _compute_tolerance(config):
                    faults += _find_leaking_parts(other, weights, layers, document_mask)
    tolerance = _compute_tolerance(harness.config)
    names = format_first([*dict.fromkeys(fault.part for fault in faults)], limit=4)
    yield build_result(
        "causality",
        [*dict.fromkeys(faults)],
        f"attention {' and '.join(paths)}: later tokens change earlier losses by at most "
        f"{largest:.1e}",
        "later tokens, another document or tokens before the window change a loss by "
        f"{largest:.1e} (tolerance {tolerance:.1e}): {names}",
        largest=largest,
        tolerance=tolerance,
    )


def _build_attention_variants(harness: EngineHarness) -> Iterator[Config]:
    """Yield the run with a loss mask, without and with a document mask, where supported."""
    config = harness.config
    for document_mask in (False, True):
        data = replace(config.data, loss_mask=True, document_mask=document_mask)
        variant = replace(config, data=data)
        if not any(find_unsupported_settings(variant)):
            yield variant


def _compute_tolerance(config: Config) -> float:
    """Return one rounding per logit: equal head rows at different positions may round apart.

    If the router selects experts, each token changes how many tokens an expert computes. Matmuls of
    other sizes have other roundings, so the tolerance is that of a forward pass.
    """
    spec, model = get_mlp_spec(config.model), config.model
    if 0 < spec.count_expert_rows(model) < spec.count_experts(model):
        return tolerances.compute_gradient_tolerance(config)
    return 4 * tolerances.compute_unit_roundoff(config.precision.compute_dtype)


def _build_weights(config: Config) -> FullTensors:
    weights = sample_weights(config)
    if "lm_head.weight" in weights:
        first, second = _EQUIVALENT_TOKENS
        weights["lm_head.weight"][second] = weights["lm_head.weight"][first]
    return weights


def _list_layer_groups(model: ModelConfig) -> list[list[int]]:
    """Return all layers, and the sliding layers if there are others too."""
    layers = [*range(model.num_layers)]
    sliding = [layer for layer in layers if reference_model.is_sliding(model, layer)]
    return [layers, sliding] if 0 < len(sliding) < len(layers) else [layers]


def _limit_attention(
    model: ModelConfig, weights: FullTensors, layers: Sequence[int], heads: slice = slice(None)
) -> FullTensors:
    """Return weights with which attention in other layers and heads has no effect on others."""
    limited = dict(weights)
    for layer in range(model.num_layers):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        weight = np.zeros_like(weights[name])
        if layer in layers:
            by_head = (model.hidden_size, -1, model.head_dim)
            weight.reshape(by_head)[:, heads] = weights[name].reshape(by_head)[:, heads]
        limited[name] = weight
    return limited


def _limit_mlps(model: ModelConfig, weights: FullTensors, layer: int) -> FullTensors:
    """Return weights with which the MLPs of other layers have no effect."""
    others = [
        spec.name
        for spec in list_parameter_specs(model)
        if spec.layer not in (layer, None)
        and spec.role is ParameterRole.residual
        and ".mlp." in spec.name
    ]
    return weights | {name: np.zeros_like(weights[name]) for name in others}


def _measure_leak(harness: EngineHarness, weights: FullTensors, layers: Sequence[int]) -> float:
    """Return the largest change of a loss among the probes, with attention in some layers."""
    harness.load_weights(weights)
    changes = []
    for first, second, documents in _build_probes(harness.config, layers):
        rows = np.tile(documents.astype(np.int32), (len(first), 1))
        changes.append(harness.evaluate(first, rows) - harness.evaluate(second, rows))
    return float(np.abs(changes).max())


def _build_probes(
    config: Config, layers: Sequence[int]
) -> Iterator[tuple[Tokens, Tokens, NDArray[np.int64]]]:
    """Yield two batches, and the document of each position that counts only their common tokens.

    The batches differ from a position on, with a document mask before the counted document, or
    before the positions that sliding layers together reach from the last counted position.
    """
    length, is_tied = config.batch.sequence_length, config.model.tie_embeddings
    positions = np.arange(length)
    for position in (2, length // 2, length - 2):
        first, second = sample_batch(config, 1), sample_batch(config, 2)
        second[:, :position] = first[:, :position]
        first[:, position], second[:, position] = _EQUIVALENT_TOKENS
        yield first, second, np.maximum(positions - (position - is_tied), 0)
    for start in (1, length // 2) if config.data.document_mask else ():
        first, second = sample_batch(config, 1), sample_batch(config, 2)
        second[:, start:] = first[:, start:]
        yield first, second, np.minimum(positions, start)
    first_unreached = length - 2 - _compute_reach(config.model, layers, length)
    if first_unreached > 0:
        first, second = sample_batch(config, 1), sample_batch(config, 2)
        second[:, first_unreached:] = first[:, first_unreached:]
        yield first, second, np.minimum(positions, length - 2)


def _compute_reach(model: ModelConfig, layers: Sequence[int], length: int) -> int:
    """Return how many positions back a position depends on tokens through some layers."""
    window = model.attention.sliding_window
    if window is None or not all(reference_model.is_sliding(model, layer) for layer in layers):
        return length
    return len(layers) * (window - 1)


def _find_leaking_parts(
    harness: EngineHarness, weights: FullTensors, layers: Sequence[int], document_mask: bool
) -> list[FaultLocation]:
    """Return the MLPs that leak without attention, or the heads that leak, tested one by one."""
    model, faults = harness.config.model, list[FaultLocation]()
    without_attention = _limit_attention(model, weights, [])
    if not _measure_leak(harness, without_attention, layers) <= _compute_tolerance(harness.config):
        for layer in range(model.num_layers):
            limited = _limit_mlps(model, without_attention, layer)
            if not _measure_leak(harness, limited, layers) <= _compute_tolerance(harness.config):
                faults.append(FaultLocation(f"layer {layer} mlp", "model"))
        return faults or [FaultLocation("a part other than attention", "model")]
    for layer in layers:
        for head in range(model.num_attention_heads):
            limited = _limit_attention(model, weights, [layer], slice(head, head + 1))
            leak = _measure_leak(harness, limited, [layer])
            if not leak <= _compute_tolerance(harness.config):
                faults.append(FaultLocation(f"layer {layer} head {head}", "model"))
    path = "attention inside documents" if document_mask else "attention"
    return faults or [FaultLocation(path, "model")]
