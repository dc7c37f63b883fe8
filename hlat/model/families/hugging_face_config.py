"""Conversion between ModelConfig and Hugging Face's config.json.

Every key that changes the computation is converted or refused: weights would load and silently
compute something else. The conversion of each family is in hlat/model/families/.
"""

import json
from collections.abc import Mapping
from typing import Any

from hlat.config.bounds import find_bounds_violations
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.model.computation_settings import (
    find_differing_settings,
    flatten_settings,
    format_setting,
    replace_settings,
)
from hlat.model.families import FAMILIES, FAMILY_NAMES
from hlat.model.families.family import Family, format_key
from hlat.model.families.ignored_keys import IGNORED_KEYS, REQUIRED_VALUES
from hlat.model.families.key_mappings import OptionalKey, RequiredKey

_MAX_POSITIONS_KEY = "max_position_embeddings"
_HF_DTYPES = {Dtype.fp32: "float32", Dtype.bf16: "bfloat16"}


def build_hf_config(
    model: ModelConfig,
    sequence_length: int,
    eos_token_id: int,
    dtype: Dtype,
    bos_token_id: int | None = None,
) -> dict[str, Any]:
    """Return the config.json of a model; its number of positions is the training's.

    Settings that changed their name appear twice: as transformers 5 reads them, and as transformers
    4 and most other programs do.

    Raises:
        ConfigError: The family cannot express a setting of the model.
    """
    raise_config_errors(find_inexpressible_settings(model))
    return {
        **_build_settings(FAMILIES[model.family], model, sequence_length),
        "initializer_range": model.init_std,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "pad_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": _HF_DTYPES[dtype],
        "torch_dtype": _HF_DTYPES[dtype],
    }


def parse_hf_config(config: Mapping[str, Any], directory: str) -> tuple[ModelConfig, int, Dtype]:
    """Return the model, the number of positions and the weight dtype of a config.json.

    Raises:
        ConfigError: A key is missing or not supported.
    """
    try:
        model = _parse_model(config)
        num_positions = config.get(_MAX_POSITIONS_KEY)
        if num_positions is None:
            raise ConfigError(f"config.json has no {_MAX_POSITIONS_KEY}")
        if type(num_positions) is not int or num_positions < 1:
            raise ConfigError(
                f"{format_key(config, _MAX_POSITIONS_KEY)}, which is not a whole number above 0"
            )
    except ConfigError as error:
        raise ConfigError(*(f"{directory}: {problem}" for problem in error.problems)) from error
    name = config.get("dtype") or config.get("torch_dtype")
    dtypes = [dtype for dtype, known in _HF_DTYPES.items() if known == name]
    return model, num_positions, dtypes[0] if dtypes else Dtype.fp32


def find_hf_config_mismatches(model: ModelConfig, config: Mapping[str, Any]) -> list[str]:
    """Return every reason why weights with this config.json do not fit the model.

    A message has the key, its value and the override to set; if several overrides are needed, a
    last message lists all of them. model.family may differ if the computation is the same.
    """
    mismatches: list[str] = []
    try:
        mappings = find_family(config).mappings
        required = [mapping for mapping in mappings if isinstance(mapping, RequiredKey)]
        missing = [mapping for mapping in required if config.get(mapping.key) is None]
        mismatches += [f"config.json has no {mapping.key}" for mapping in missing]
        sizes = {mapping.key: getattr(model, mapping.setting) for mapping in missing}
        other = _parse_model({**config, **sizes})
    except ConfigError as error:
        return [*mismatches, *error.problems]
    paths = find_differing_settings(model, other)
    if not paths:
        return mismatches
    if model.family != other.family:
        paths.insert(0, "family")
    overrides = [format_setting(other, path) for path in paths]
    mismatches += [
        f"config.json has {_format_hf_setting(config, other, path)}, this run has "
        f"{format_setting(model, path)}; set {override}"
        for path, override in zip(paths, overrides, strict=True)
    ]
    if len(overrides) > 1:
        mismatches.append(f"to set them all: {' '.join(overrides)}")
    return mismatches


def find_inexpressible_settings(model: ModelConfig) -> list[str]:
    """Return a message for each setting that the config.json of model.family cannot express."""
    if model.family not in FAMILIES:
        return [f"model.family={model.family} is unknown; use {', '.join(FAMILY_NAMES)}"]
    try:
        parsed = _convert_to_family(model, model.family)
    except ConfigError as error:
        start = f"model.family={model.family} cannot express this model"
        return [f"{start}: {problem}" for problem in error.problems]
    paths = find_differing_settings(model, parsed)
    families = [name for name in FAMILY_NAMES if _is_expressible(model, name)] if paths else []
    kinds = [path for path in paths if path.endswith(".kind")]
    if kinds and not families:
        return [f"no family of transformers has {format_setting(model, kind)}" for kind in kinds]
    alternatives = f"model.family={families[0]} or " if families else ""
    return [
        f"{format_setting(model, path)} cannot be exported with model.family={model.family}; "
        f"use {alternatives}{format_setting(parsed, path)}"
        for path in paths
    ]


def _is_expressible(model: ModelConfig, family: str) -> bool:
    try:
        return not find_differing_settings(model, _convert_to_family(model, family))
    except ConfigError:
        return False


def _convert_to_family(model: ModelConfig, family: str) -> ModelConfig:
    """Return the model that the config.json of a family describes."""
    return _parse_model(_build_settings(FAMILIES[family], model, 1))


def _build_settings(family: Family, model: ModelConfig, sequence_length: int) -> dict[str, Any]:
    """Return the keys of config.json that determine the computation."""
    settings: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        _MAX_POSITIONS_KEY: sequence_length,
        "attention_dropout": 0.0,
    }
    for mapping in family.mappings:
        settings |= mapping.build(model)
    return settings


def _parse_model(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a config.json; raise ConfigError with every problem."""
    family = find_family(config)
    problems = _find_unsupported_keys(family, config)
    settings: dict[str, Any] = {}
    sizes = [mapping for mapping in family.mappings if isinstance(mapping, RequiredKey)]
    others = [mapping for mapping in family.mappings if not isinstance(mapping, RequiredKey)]
    for mappings in (sizes, others):  # the other mappings read the sizes
        for mapping in mappings:
            try:
                settings |= mapping.parse(config)
            except ConfigError as error:
                problems += error.problems
        raise_config_errors(problems)
    shape = {path: value for path, value in settings.items() if "." not in path}
    model = ModelConfig(name=family.name, family=family.name, **shape)
    model = replace_settings(model, family.fixed | settings)
    raise_config_errors(find_bounds_violations(model, "config.json: model."))
    if family.heads_divide_hidden_size and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"num_attention_heads={model.num_attention_heads} does not divide "
            f"hidden_size={model.hidden_size}, which transformers requires of {family.model_type}"
        )
    return model


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    Raises:
        ConfigError: It is not a supported one.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    for family in FAMILIES.values():
        if model_type == family.model_type and architectures in (None, [family.architecture]):
            return family
    hints = {
        "gemma3": "; save the text model of Gemma 3, model_type=gemma3_text",
        "deepseek_v3": "; deepseek_v3 has multi-head latent attention, which hlat lacks",
    }
    raise ConfigError(
        f"config.json has model_type={json.dumps(model_type)} "
        f"architectures={json.dumps(architectures)}; hlat supports only "
        + ", ".join(f"{family.model_type} [{family.architecture}]" for family in FAMILIES.values())
        + (hints.get(model_type, "") if isinstance(model_type, str) else "")
    )


def _find_unsupported_keys(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Return a message for each key that could change the computation and is not converted."""
    problems = []
    required = {key: v for key, v in REQUIRED_VALUES.items() if key not in family.keys}
    known = family.keys | IGNORED_KEYS | set(family.ignored_keys) | required.keys()
    for key, value in config.items():
        if value is None:
            continue
        if key == "attention_dropout":
            if value != 0:
                problems.append(
                    f"{format_key(config, key)}; training applies no dropout; set it to 0.0 in "
                    "config.json"
                )
        elif key == "quantization_config":
            problems.append(
                f"config.json has {key}; use a directory with weights that are not quantized"
            )
        elif key in required and value != required[key]:
            supported = f"{key}={json.dumps(required[key])}"
            problems.append(f"{format_key(config, key)}; hlat supports only {supported}")
        elif key not in known:
            problems.append(
                f"{format_key(config, key)}, which is not supported with "
                f"model_type={family.model_type}; remove it if it does not change the computation"
            )
    return problems


def _format_hf_setting(config: Mapping[str, Any], model: ModelConfig, path: str) -> str:
    """Return a key of config.json and its value, or the setting that config.json implies."""
    if path == "family":
        return f"model_type={json.dumps(config['model_type'])}"
    keys = {"num_key_value_heads": "num_key_value_heads", "rope_theta": "rope_theta"} | {
        mapping.setting: mapping.key
        for mapping in FAMILIES[model.family].mappings
        if isinstance(mapping, RequiredKey | OptionalKey)
    }
    if path in keys:
        return f"{keys[path]}={json.dumps(flatten_settings(model)[path])}"
    return format_setting(model, path)
