"""hlat's Llama on NxD's layers, over tensor-parallel ranks and pipeline stages."""

from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.utils import get_device
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.model.decoder import Decoder, DecoderLayer
from hlat.model.linear import Embedding, Linear
from hlat.model.norm import RMSNorm
from hlat.model.rope import compute_rope_cos_sin
from tests.nxd.on_ranks.start import filled_with, host

SEQUENCE = 1
COLUMNS = ("qkv_proj", "gate_up_proj", "lm_head")


class SequenceShardedEmbedding(ParallelEmbedding):
    """Embedding with outputs that are sharded along the sequence."""

    def forward(self, ids: Tensor) -> Tensor:
        return mappings.reduce_scatter_to_sequence_parallel_region(super().forward(ids), SEQUENCE)


class Layer(DecoderLayer):
    """Layer with the activation as its only input: NxD's pipeline transfers nothing else."""

    def __init__(self, shape: ModelConfig, layer: int, length: int) -> None:
        super().__init__(shape, layer, fp32_norms=False)
        self.shape, self.length = shape, length

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(self.length, device=x.device)
        return super().forward(x, compute_rope_cos_sin(self.shape, positions, x.dtype))


class LlamaWithLoss(nn.Module):
    """Model that NxD's pipeline partitions; autowrapped functions must be names of this module."""

    def __init__(
        self, shape: ModelConfig, weights: dict[str, Tensor], sequence_parallel: bool, length: int
    ) -> None:
        super().__init__()
        self.model = Decoder(shape)
        for name in self.model.layers:
            self.model.layers[name] = Layer(shape, int(name), length)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, RMSNorm):
                filled_with(weights[f"{name}.weight"])(module.weight)
                module.weight.sequence_parallel_enabled = sequence_parallel
            elif isinstance(module, Linear | Embedding):
                fill = filled_with(weights[f"{name}.weight"])
                self.model.set_submodule(name, _parallel(name, module, fill, sequence_parallel))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.model.embed_tokens(tokens)
        for layer in self.model.layers.values():
            stream = layer(stream)
        logits = self.model.lm_head(self.model.norm(stream))
        return parallel_cross_entropy(logits, targets).mean()


def _parallel(name: str, module: nn.Module, fill: Any, sequence_parallel: bool) -> nn.Module:
    if isinstance(module, Embedding):
        embedding = SequenceShardedEmbedding if sequence_parallel else ParallelEmbedding
        size = module.weight.shape
        return embedding(*size, init_method=fill, collect_output=not sequence_parallel)
    options = {
        "bias": False,
        "init_method": fill,
        "sequence_parallel_enabled": sequence_parallel,
        "sequence_dimension": SEQUENCE if sequence_parallel else None,
    }
    sizes = (module.in_features, module.out_features)
    if name.endswith(COLUMNS):
        return ColumnParallelLinear(*sizes, gather_output=False, **options)
    return RowParallelLinear(*sizes, input_is_parallel=True, **options)


def _configuration(num_layers: int, tp: int, sequence_parallel: bool) -> dict[str, Any]:
    """Return NxD's configuration with `world_size / tp` stages of equal size."""
    stages = dist.get_world_size() // tp
    pipeline = {
        "transformer_layer_cls": Layer,
        "num_microbatches": 2,
        "output_loss_value_spec": True,
        "input_names": ["tokens", "targets"],
        "pipeline_cuts": [f"model.layers.{num_layers // stages * i - 1}" for i in range(1, stages)],
        "leaf_module_cls": [
            *("ColumnParallelLinear", "SequenceShardedEmbedding", "ParallelEmbedding", "RMSNorm"),
        ],
        "autowrap_functions": (parallel_cross_entropy,),
        "use_optimizer_wrapper": True,
    }
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=stages,
        pipeline_config=pipeline if stages > 1 else None,
        sequence_parallel=sequence_parallel,
    )


def train(
    shape: ModelConfig,
    weights: dict[str, Tensor],
    batch: tuple[Tensor, Tensor],
    tp: int,
    sequence_parallel: bool,
) -> dict[str, Any]:
    """Return loss, gradients by name and gradient norm of a step."""
    dist.init_process_group("xla", init_method="xla://")
    config = _configuration(shape.num_layers, tp, sequence_parallel)
    model = nxd.initialize_parallel_model(
        config, lambda: LlamaWithLoss(shape, weights, sequence_parallel, batch[0].shape[1])
    )
    if config["pipeline_parallel_size"] > 1:
        named = dict(model.local_named_parameters())
        loss = model.run_train(tokens=batch[0], targets=batch[1])
    else:
        named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
        loss = model(*(tensor.to(get_device()) for tensor in batch))
        loss.backward()
    optimizer = nxd.initialize_parallel_optimizer(
        config, torch.optim.SGD, list(named.values()), lr=0.0
    )
    grads = host(*(parameter.grad for parameter in named.values()))
    optimizer.step()
    return {
        "loss": None if loss is None else loss.item(),
        "grads": {n.removeprefix("model."): g for n, g in zip(named, grads, strict=True)},
        "norm": optimizer.grad_norm.item(),
    }
