"""Llama of AWS's examples, saved by NxD."""

import importlib.util
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.utils import get_device
from torch import Tensor, nn
from transformers import LlamaConfig

from tests.nxd.on_ranks.start import filled_with, host

EXAMPLE = Path(nxd.__file__).parents[2] / "examples/training/llama/modeling_llama_nxd.py"


def saved(
    folder: str,
    settings: dict[str, Any],
    weights: tuple[list[Tensor], dict[str, Tensor], list[tuple[Tensor, Tensor]]],
    tokens: Tensor | None,
    tp: int,
    xser: bool,
) -> Tensor | None:
    """Save a Llama as tag step_3; return the shard of the logits on this rank.

    `weights` are the full matrices in the order in which the example creates them, the norms by
    name, and the keys and values of each layer, unless NxD places their replicas.
    """
    dist.init_process_group("xla", init_method="xla://")
    example = _example()
    full_tensors, norms, heads = weights
    fill = filled_with(*full_tensors)
    example._init_normal = lambda _, full: fill(full)
    dtype = full_tensors[0].dtype

    def build() -> nn.Module:
        model = example.LlamaForCausalLM(_configuration(settings, dtype)).to(dtype)
        with torch.no_grad():
            for name, norm in norms.items():
                model.get_parameter(name).copy_(norm)
            for layer, local in zip(model.model.layers, heads, strict=False):
                _fill_heads(layer.self_attn.qkv_proj, local)
        return model

    stages = dist.get_world_size() // tp
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=stages,
        pipeline_config=_pipeline(example) if stages > 1 else None,
    )
    model = nxd.initialize_parallel_model(config, build, True)
    nxd.save_checkpoint(folder, tag="step_3", model=model, use_xser=xser)
    if tokens is None:
        return None
    with torch.no_grad():
        (logits,) = host(model(tokens.to(get_device()))[0])
    return logits


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("modeling_llama_nxd", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _configuration(settings: dict[str, Any], dtype: torch.dtype) -> LlamaConfig:
    """Add the settings of the example's script to those of config.json."""
    return LlamaConfig(
        **settings,
        pretraining_tp=1,
        use_cache=False,
        return_dict=False,
        torch_dtype=dtype,
        sequence_parallel_enabled=False,
        selective_checkpoint_enabled=False,
        transpose_nki_inputs=False,
    )


def _pipeline(example: Any) -> dict[str, Any]:
    return {
        "transformer_layer_cls": example.LlamaDecoderLayer,
        "output_loss_value_spec": (True, False),
        "input_names": ["input_ids", "attention_mask", "labels"],
        "auto_partition": True,
        "leaf_module_cls": ["LlamaRMSNorm", "LlamaRotaryEmbedding"],
        "autowrap_modules": [mappings],
        "use_optimizer_wrapper": True,
    }


def _fill_heads(layer: nn.Module, heads: tuple[Tensor, Tensor]) -> None:
    groups = parallel_state.get_kv_shared_replica_groups()
    (group,) = [i for i, ranks in enumerate(groups) if dist.get_rank() in ranks]
    kv_size = layer.kv_output_size_per_partition
    if layer.fuse_qkv:
        _, *local = layer.weight_qkv.split([layer.q_output_size_per_partition, kv_size, kv_size])
    else:
        local = [layer.weight_k, layer.weight_v]
    for parameter, full in zip(local, heads, strict=True):
        parameter.copy_(full.split(kv_size)[group % (len(full) // kv_size)])
