"""Small models of every family, of hlat and of transformers, with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from hlat.config.config_json import parse_section
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.model.attention_spec import LayerType
from hlat.model.computation_settings import replace_settings
from hlat.model.decoder import Decoder
from hlat.model.families import FAMILIES, FAMILY_NAMES
from hlat.model.families.hugging_face_config import build_hf_config
from hlat.model.rope_spec import RopeScaling
from tests.support.canonical_parameters import iter_canonical_views

transformers = pytest.importorskip("transformers")

MAX_LENGTH = 24
"""Tokens per sequence; longer than every window and original number of positions below."""

SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope.scaling": RopeScaling.linear, "rope.factor": 2.0},
    "dynamic": {
        "rope.scaling": RopeScaling.dynamic,
        "rope.factor": 4.0,
        "rope.original_max_positions": 8,
    },
    "llama3": {
        "rope.scaling": RopeScaling.llama3,
        "rope.factor": 8.0,
        "rope.original_max_positions": 16,
        "rope.low_freq_factor": 2.0,
        "rope.high_freq_factor": 5.0,
    },
    "yarn": {
        "rope.scaling": RopeScaling.yarn,
        "rope.factor": 4.0,
        "rope.original_max_positions": 8,
        "rope.beta_fast": 16.0,
        "rope.beta_slow": 2.0,
        "rope.attention_factor": 1.25,
    },
}
"""Settings of the rotary embedding by type of scaling."""

UNSCALED = {"rope.scaling": RopeScaling.none, "rope.attention_factor": None}


def load_preset(name: str) -> ModelConfig:
    """Return the model of conf/model/<name>.yaml."""
    folder = Path(__file__).resolve().parents[2] / "conf" / "model"
    settings: Any = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    return parse_section(ModelConfig, settings.get("model", settings))


TINY_MODELS = {name: load_preset(f"{name}_tiny") for name in FAMILY_NAMES}
"""Preset of about 1.5 M parameters by family."""


def load_config_class(family: str) -> Any:
    """Return the configuration class of transformers."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return mapping[FAMILIES[family].model_type]


@st.composite
def small_models(draw: st.DrawFn, family: str) -> ModelConfig:
    """Sample a model that has the components of a family and differs in every size.

    With fewer units or tokens, gradients are differences of almost equal numbers. With a window of
    one position, the KV cache of transformers attends to all positions.
    """
    num_groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_heads = num_groups * group_size
    has_multiples = FAMILIES[family].heads_divide_hidden_size
    hidden_size = draw(st.integers(8, 24)) * num_heads if has_multiples else None
    settings: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 5)),
        "hidden_size": hidden_size or draw(st.integers(16, 60)),
        "intermediate_size": draw(st.integers(8, 90)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_groups,
        "vocab_size": draw(st.integers(16, 300)),
        "rope_theta": draw(st.sampled_from([123.0, 1e4, 5e5])),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "tie_embeddings": draw(st.booleans()),
        "attention.head_dim": 2 * draw(st.integers(4, 12)),
        **UNSCALED,
        **SCALINGS[draw(st.sampled_from(list(SCALINGS)))],
    }
    model = TINY_MODELS[family]
    if model.mlp.kind == "moe":
        settings["mlp.moe.num_experts"] = draw(st.integers(2, 6))
        settings["mlp.moe.experts_per_token"] = draw(
            st.integers(1, settings["mlp.moe.num_experts"])
        )
    if family == "qwen3_moe":
        settings["mlp.moe.intermediate_size"] = draw(st.integers(8, 40))
        every = draw(st.integers(1, settings["num_layers"]))
        last_sparse_layer = settings["num_layers"] // every * every - 1
        settings["mlp.moe.every"] = every
        settings["mlp.moe.num_dense_layers"] = draw(st.integers(0, last_sparse_layer))
    if family in ("qwen3_moe", "olmoe"):
        settings["mlp.moe.normalize_top_k"] = draw(st.booleans())
    if family == "olmoe":
        settings["attention.head_dim"] = None
        settings["hidden_size"] = num_heads * 2 * draw(st.integers(4, 12))
    if model.rope.sliding_theta is not None:
        settings["rope.sliding_theta"] = settings["rope_theta"]
    windowed = ("qwen2", "qwen3", "mistral", "smollm3", "olmo3", "gemma2", "gemma3")
    if family in (*windowed, "mixtral", "qwen3_moe"):
        settings["attention.sliding_window"] = draw(st.none() | st.integers(2, 12))
        patterns = st.lists(st.sampled_from(LayerType), max_size=4)
        settings["attention.layer_pattern"] = (
            [] if family in ("mistral", "mixtral", "qwen3_moe") else draw(patterns)
        )
    if settings.get("attention.sliding_window", 0) is None:
        settings["attention.layer_pattern"] = []
    if family == "smollm3":
        settings["rope.layer_pattern"] = draw(st.lists(st.booleans(), max_size=4))
    if family == "gemma3":
        settings["rope.sliding_theta"] = draw(st.sampled_from([77.0, 1e4]))
    if family.startswith("gemma"):
        settings["attention.scale"] = draw(st.integers(8, 40)) ** -0.5
        settings["head.logit_softcap"] = draw(st.none() | st.sampled_from([2.0, 30.0]))
    if family == "gemma2":
        settings["attention.logit_softcap"] = draw(st.none() | st.sampled_from([1.0, 50.0]))
    if family not in ("qwen2", "mistral", "mixtral"):
        has_bias = draw(st.booleans())
        settings |= {"attention.qkv_bias": has_bias, "attention.output_bias": has_bias}
    return replace_settings(model, settings)


def build_transformers_model(model: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """Return a randomly initialized model of transformers, from the config.json of an export.

    The initial values limit rounding errors: inputs of norms are about one, and no softmax is
    saturated.
    """
    settings = build_hf_config(model, MAX_LENGTH, 0, Dtype.fp32)
    config = load_config_class(model.family).from_dict(settings)
    config.eos_token_id = None
    kernels = {"attn_implementation": "eager"}
    if model.mlp.kind == "moe":  # the grouped matmul of others needs strides of 16 bytes
        kernels["experts_implementation"] = "eager"
    peer = transformers.AutoModelForCausalLM.from_config(config, **kernels)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peer.named_parameters():
        mean = float(parameter.dim() == 1 and bool((parameter == 1).all()))  # weight of a norm
        std = 0.2 if parameter.dim() == 1 else 0.5 * parameter.shape[-1] ** -0.5
        if "embed_tokens" in name:
            std = 0.4 if model.tie_embeddings else 0.5
        torch.nn.init.normal_(parameter, mean, std, generator=generator)
    return peer


def build_decoder(model: ModelConfig, peer: torch.nn.Module) -> Decoder:
    """Return a decoder with the weights of a model of transformers."""
    decoder, source = Decoder(model), get_peer_tensors(peer)
    views = get_canonical_tensors(decoder)
    assert views.keys() == source.keys()
    for name, view in views.items():
        view.copy_(source[name].detach().view(view.shape))
    return decoder


def get_peer_tensors(peer: torch.nn.Module, gradients: bool = False) -> dict[str, Tensor]:
    """Return the weights or gradients of a model of transformers by canonical name.

    transformers 5 fuses the experts of a layer: gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in peer.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        path, _, leaf = name.rpartition(".")
        if tensor is None:
            continue
        if not path.endswith(".experts"):
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for part, weight in zip(leaves, matrix.chunk(len(leaves)), strict=True):
                tensors[f"{path}.{expert}.{part}.weight"] = weight
    return tensors


def get_canonical_tensors(decoder: Decoder, gradients: bool = False) -> dict[str, Tensor]:
    """Return views of the weights or gradients by canonical name."""
    tensors: Any = {
        name: parameter.grad if gradients else parameter.detach()
        for name, parameter in decoder.named_parameters()
    }
    return dict(iter_canonical_views(decoder.config, tensors))
