"""Activations that layers save for the backward pass against the specifications."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.engine.native.layer_transforms import apply_activation_checkpointing
from hlat.model import decoder_spec
from hlat.model.attention_kernels import KeyRange, compute_document_starts
from hlat.model.decoder import Decoder
from hlat.model.families import FAMILY_NAMES
from hlat.model.rope import compute_rope_cos_sin
from hlat.plan.pipeline_stage_shards import build_execution_settings
from hlat.precision.torch_dtypes import TORCH_DTYPES
from tests.support.model_components import COMPONENTS

LENGTH = 64
VARIANTS = {name: settings.split() for name, settings in COMPONENTS.items()}
VARIANTS |= {f"{family}_tiny": [f"model={family}_tiny"] for family in FAMILY_NAMES}
TOLERANCE = 0.03
"""Sums with one element per token or head, such as those of a softmax, are not listed."""


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow_after(7)
def test_saved_bytes_of_every_layer(compose, variant, recipe) -> None:
    composed = resolve_config(
        compose(
            *("parallelism=single", f"precision={recipe}", f"batch.sequence_length={LENGTH}"),
            *("batch.micro_batch_size=2", "batch.global_batch_size=2"),
            *VARIANTS[variant],
        )
    )
    for mode, documents in itertools.product(ActivationCheckpointing, [False, True]):
        layout = replace(composed.parallelism, activation_checkpointing=mode)
        data = replace(composed.data, document_mask=documents)
        config = replace(composed, parallelism=layout, data=data)
        execution = build_execution_settings(config, ParallelDegrees())
        for layer, found in measure_saved_bytes(config, documents).items():
            activations = decoder_spec.list_layer_activations(config.model, layer, execution)
            planned = 2 * LENGTH * execution.compute_saved_bytes(activations)
            assert found == pytest.approx(planned, rel=TOLERANCE), (mode, documents, layer)


def measure_saved_bytes(config: Config, documents: bool) -> dict[int, int]:
    """Return the bytes that torch saves in each layer, without weights and shared tensors."""
    model, dtype = config.model, TORCH_DTYPES[config.precision.compute_dtype]
    decoder = Decoder(model, fp32_norms=True).to(dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(0.01)
    apply_activation_checkpointing(decoder, config.parallelism.activation_checkpointing)
    ids = torch.arange(LENGTH).floor_divide(24).expand(2, -1)
    key_range = KeyRange(compute_document_starts(ids), None) if documents else None
    found = {}
    for name, layer in decoder.layers.items():
        x = torch.randn(2, LENGTH, model.hidden_size, dtype=dtype, requires_grad=True) * 1
        rope = compute_rope_cos_sin(model, torch.arange(LENGTH), dtype, layer.is_sliding)
        cos_sin = rope if layer.has_rope else None
        shared = [*decoder.parameters(), *rope]
        if key_range is not None:
            shared.append(key_range.first_BS)
        ignored = {tensor.untyped_storage().data_ptr() for tensor in shared}
        storages: dict[int, int] = {}
        saved = []

        def pack(tensor: Tensor, ignored=ignored, storages=storages, saved=saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ignored:
                storages[storage.data_ptr()] = storage.nbytes()
            # Saved so that addresses are unique, and detached because a cycle is never freed
            saved.append(tensor.detach())
            return saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(x, cos_sin, key_range)
        found[int(name)] = sum(storages.values())
        del y
    return found
