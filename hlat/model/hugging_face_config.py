"""Conversion between ModelConfig and Hugging Face's config.json, as transformers' LlamaConfig.

Unsupported settings (biases, scaled rotary embedding, other architectures) are errors: weights
would load and silently compute something else.
"""

import json
from collections.abc import Mapping
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype

_HF_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Keys of config.json by field of ModelConfig."""

_HF_DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Defaults of LlamaConfig."""

_REQUIRED_VALUES = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
_MAX_POSITIONS_KEY = "max_position_embeddings"
_HF_DTYPES = {Dtype.fp32: "float32", Dtype.bf16: "bfloat16"}


def build_hf_config(
    model: ModelConfig, sequence_length: int, eos_token_id: int, dtype: Dtype
) -> dict[str, Any]:
    """Return the config.json of a model; its number of positions is the training's.

    The rotary base and the dtype of the weights appear twice: as transformers 5 reads them, and as
    transformers 4 and most other programs do. There is no BOS token, since training uses none.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(model, name) for name, key in _HF_KEYS.items()},
        "head_dim": model.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        _MAX_POSITIONS_KEY: sequence_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": _HF_DTYPES[dtype],
        "torch_dtype": _HF_DTYPES[dtype],
    }


def parse_hf_config(config: Mapping[str, Any], directory: str) -> tuple[ModelConfig, int, Dtype]:
    """Return the model shape, the number of positions and the weight dtype of a config.json.

    Raises:
        ConfigError: The model in the directory is not a supported Llama or a key is missing.
    """
    if problems := _find_unsupported_settings(config):
        raise ConfigError(*(f"{directory}: {problem}" for problem in problems))
    shape = _extract_shape(config)
    known = {**config, **shape}
    if missing := [key for key in (*_HF_KEYS.values(), _MAX_POSITIONS_KEY) if key not in known]:
        raise ConfigError(f"{directory}: config.json has no {', '.join(missing)}")
    dtype = {name: dtype for dtype, name in _HF_DTYPES.items()}.get(
        config.get("dtype") or config.get("torch_dtype") or "float32", Dtype.fp32
    )
    model = ModelConfig(name="llama", **{name: shape[key] for name, key in _HF_KEYS.items()})
    return model, int(config[_MAX_POSITIONS_KEY]), dtype


def find_hf_config_mismatches(model: ModelConfig, config: Mapping[str, Any]) -> list[str]:
    """Return every reason why weights with this config.json do not fit the model.

    A message has the key, its value and the override to set; if several overrides are needed, a
    last message lists all of them.
    """
    mismatches = _find_unsupported_settings(config)
    if mismatches:
        return mismatches
    hf_shape = _extract_shape(config)
    overrides = []
    for name, key in _HF_KEYS.items():
        value = getattr(model, name)
        if key not in hf_shape:
            mismatches.append(f"config.json has no {key}")
        elif value != hf_shape[key]:
            overrides.append(f"model.{name}={json.dumps(hf_shape[key])}")
            mismatches.append(
                f"config.json has {key}={json.dumps(hf_shape[key])}, this run has "
                f"model.{name}={json.dumps(value)}; set {overrides[-1]}"
            )
    if len(overrides) > 1:
        mismatches.append(f"to set them all: {' '.join(overrides)}")
    return mismatches


def _extract_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that define shape and arithmetic, with the defaults of transformers."""
    shape = {key: config[key] for key in _HF_KEYS.values() if config.get(key) is not None}
    if "num_attention_heads" in shape:
        shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    for rope in _get_rope_settings(config).values():
        if rope.get("rope_theta") is not None:
            shape["rope_theta"] = rope["rope_theta"]
    return _HF_DEFAULTS | shape


def _find_unsupported_settings(config: Mapping[str, Any]) -> list[str]:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type != "llama" or architectures not in (None, ["LlamaForCausalLM"]):
        return [
            f"config.json has model_type={json.dumps(model_type)} "
            f"architectures={json.dumps(architectures)}; hlat supports only "
            '"llama" ["LlamaForCausalLM"]'
        ]
    problems = [
        f"config.json has {key}={json.dumps(config[key])}; hlat supports only "
        f"{key}={json.dumps(value)}"
        for key, value in _REQUIRED_VALUES.items()
        if config.get(key, value) != value
    ]
    if config.get("quantization_config") is not None:
        problems.append(
            "config.json has quantization_config; use a directory with weights that are not "
            "quantized"
        )
    ropes = _get_rope_settings(config)
    problems += [
        f"config.json has {key}={json.dumps(rope)}; hlat does not support scaled rotary embeddings"
        for key, rope in ropes.items()
        if rope.get("rope_type", rope.get("type", "default")) != "default"
        or rope.get("partial_rotary_factor", 1) != 1
    ]
    thetas = {theta for one in (config, *ropes.values()) if (theta := one.get("rope_theta"))}
    if len(thetas) > 1:
        values = ", ".join(sorted(map(json.dumps, thetas)))
        problems.append(f"config.json has several rope_theta: {values}")
    head_dim, num_heads = config.get("head_dim"), config.get("num_attention_heads", 0)
    hidden_size = config.get("hidden_size")
    if head_dim is not None and head_dim * num_heads != hidden_size:
        problems.append(
            f"config.json has head_dim={head_dim} x num_attention_heads={num_heads}, but "
            f"hidden_size={hidden_size}; hlat requires the product to equal the hidden size"
        )
    return problems


def _get_rope_settings(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rotary settings of transformers 4, then those of transformers 5."""
    ropes = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    return {k: v if isinstance(v, Mapping) else {"rope_type": v} for k, v in ropes.items()}
