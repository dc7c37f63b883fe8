"""A model's shape as Hugging Face's config.json says it, there and back.

The names and defaults are those of transformers' LlamaConfig. What this Llama cannot be (biases, a
scaled rotary embedding, another architecture) is refused by name: weights that load but mean
something else would train without a word.
"""

import json
from collections.abc import Mapping
from typing import Any

from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.config.precision import Dtype

_FIELDS = {
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
"""Fields of the model by the key of config.json that says the same."""

_DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What LlamaConfig takes for a key that is missing."""

_POSITIONS = "max_position_embeddings"
_DTYPES = {Dtype.fp32: "float32", Dtype.bf16: "bfloat16"}


def to_config(model: Model, sequence_length: int, eos: int, dtype: Dtype) -> dict[str, Any]:
    """The config.json of a model.

    The base of the rotary embedding and the dtype stand there twice, as transformers 5 and as
    transformers 4 and most other programs read them. There is no BOS: none was seen in training.

    Args:
        model: Shape of the model.
        sequence_length: Tokens per sequence in training: the positions that the model knows.
        eos: Id of the token that ends a document.
        dtype: The weights' dtype in the files.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(model, name) for name, key in _FIELDS.items()},
        "head_dim": model.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        _POSITIONS: sequence_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "dtype": _DTYPES[dtype],
        "torch_dtype": _DTYPES[dtype],
    }


def from_config(config: Mapping[str, Any], named: str) -> tuple[Model, int, Dtype]:
    """The model that a config.json describes, the positions that it knows, and its weights' dtype.

    Args:
        config: What config.json holds.
        named: The folder, for messages.

    Raises:
        ConfigError: It is not a Llama as hlat's, or lacks a key.
    """
    if found := list(_unsupported(config)):
        raise ConfigError(*(f"{named}: {problem}" for problem in found))
    shape = _shape(config)
    if missing := [
        key for key in (*_FIELDS.values(), _POSITIONS) if key not in {**config, **shape}
    ]:
        raise ConfigError(f"{named}: config.json has no {', '.join(missing)}")
    fields = {name: shape[key] for name, key in _FIELDS.items()}
    dtype = {name: dtype for dtype, name in _DTYPES.items()}.get(
        config.get("dtype") or config.get("torch_dtype") or "float32", Dtype.fp32
    )
    return Model(name="llama", **fields), int(config[_POSITIONS]), dtype


def problems(model: Model, config: Mapping[str, Any]) -> list[str]:
    """Every reason why weights with this config.json are not those of the model.

    Args:
        model: Shape of the model that is to be filled.
        config: What config.json holds.

    Returns:
        One sentence each, which names the key, its value and what to set; for several values to
        set, a last one with all of them.
    """
    found = list(_unsupported(config))
    if found:
        return found
    theirs = _shape(config)
    settings = []
    for name, key in _FIELDS.items():
        ours = getattr(model, name)
        if key not in theirs:
            found.append(f"config.json has no {key}")
        elif ours != theirs[key]:
            settings.append(f"model.{name}={_text(theirs[key])}")
            found.append(
                f"config.json has {key}={_text(theirs[key])}, this run has "
                f"model.{name}={_text(ours)}; set {settings[-1]}"
            )
    return [*found, f"to set them all: {' '.join(settings)}"] if len(settings) > 1 else found


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that fix shape and arithmetic, where transformers looks for them."""
    shape = {key: config[key] for key in _FIELDS.values() if config.get(key) is not None}
    if "num_attention_heads" in shape:
        shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    for rope in _ropes(config).values():
        if rope.get("rope_theta") is not None:
            shape["rope_theta"] = rope["rope_theta"]
    return _DEFAULTS | shape


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """What this Llama is not."""
    model_type, kinds = config.get("model_type"), config.get("architectures")
    if model_type != "llama" or kinds not in (None, ["LlamaForCausalLM"]):
        return [
            f"config.json has model_type={_text(model_type)} architectures={_text(kinds)}; hlat "
            'trains "llama" ["LlamaForCausalLM"] alone'
        ]
    wanted = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    found = [
        f"config.json has {key}={_text(config[key])}; hlat's Llama has {key}={_text(value)} alone"
        for key, value in wanted.items()
        if config.get(key, value) != value
    ]
    if config.get("quantization_config") is not None:
        found.append(
            "config.json has quantization_config; name a folder whose weights are not quantised"
        )
    found += [
        f"config.json has {key}={_text(rope)}; hlat's rotary embedding is not scaled"
        for key, rope in _ropes(config).items()
        if rope.get("rope_type", rope.get("type", "default")) != "default"
        or rope.get("partial_rotary_factor", 1) != 1
    ]
    bases = {base for r in [config, *_ropes(config).values()] if (base := r.get("rope_theta"))}
    if len(bases) > 1:
        found.append(f"config.json has several rope_theta: {', '.join(sorted(map(_text, bases)))}")
    head_dim, heads = config.get("head_dim"), config.get("num_attention_heads", 0)
    hidden = config.get("hidden_size")
    if head_dim is not None and head_dim * heads != hidden:
        found.append(
            f"config.json has head_dim={head_dim} x num_attention_heads={heads}, but "
            f"hidden_size={hidden}; hlat's heads divide the hidden size exactly"
        )
    return found


def _ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What is said of the rotary embedding: by transformers 4, then by transformers 5."""
    said = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    return {k: v if isinstance(v, Mapping) else {"rope_type": v} for k, v in said.items()}


def _text(value: object) -> str:
    """A value as config.json and a command line spell it."""
    return json.dumps(value)
