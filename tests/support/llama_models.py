"""Small Llama models of hlat and of transformers, which tests of weights compare."""

from collections.abc import Iterator

import pytest
import torch

from hlat.config.model import ModelConfig
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from tests.support.canonical_parameters import iter_canonical_views

transformers = pytest.importorskip("transformers")

MODELS = {
    "mha": ModelConfig("mha", 2, 64, 96, 4, 4, 131, rms_norm_eps=1e-6),
    "gqa": ModelConfig("gqa", 2, 96, 104, 6, 2, 1031, rope_theta=500000.0),
    "one_kv_head": ModelConfig("one_kv_head", 2, 64, 88, 4, 1, 131),
    "head_dim_48": ModelConfig("head_dim_48", 2, 192, 352, 4, 2, 1031),
    "tied": ModelConfig("tied", 2, 64, 96, 4, 2, 131, tie_embeddings=True),
}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def build_transformers_llama(model: ModelConfig, init_std: float = 0.2) -> torch.nn.Module:
    """Return a randomly initialized LlamaForCausalLM with the shapes of a model."""
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings,
        initializer_range=init_std,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def build_weight_shards(model: ModelConfig, ours: Decoder) -> list[StateShard]:
    """Return the weights of a model as shards that share its memory."""
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(model)}
    views = iter_canonical_views(model, {n: p.detach() for n, p in ours.named_parameters()})
    return [
        StateShard(f"weights/{name}", shapes[name], (0,) * len(shapes[name]), shapes[name], view)
        for name, view in views
    ]
