"""Overrides for the model of a Hugging Face config.json, which needs no preset."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.model_overrides import format_model_overrides
from hlat.config.untrusted_files import format_value, load_untrusted_json
from hlat.model.decoder_spec import count_parameters
from hlat.model.families.hugging_face_config import parse_hf_config

_PRESETS = {
    "160m": (0.162e9, 1024),
    "1b": (1.1e9, 2048),
    "llama3_8b": (8.03e9, 4096),
    "llama3_70b": (70.55e9, 4096),
}
"""Presets with the settings of a size: their parameters, and tokens per sequence."""


def build_model_overrides(file: Path, overrides: Iterable[str]) -> list[str]:
    """Return overrides that select the model of a config.json, without keys that the user sets.

    All settings other than those of the model are those of the preset of the nearest size.

    Raises:
        ConfigError: The file cannot be read, the model is not supported, or an override selects
            another model.
    """
    keys = {word.lstrip("+~").partition("=")[0] for word in overrides}
    for key in ("model", "experiment"):
        if key in keys:
            raise ConfigError(f"config_json={file} and {key}= both select a model; remove one")
    model, num_positions = load_hugging_face_model(file)
    preset = _find_nearest_preset(count_parameters(model))
    words = format_model_overrides(model, preset)
    if num_positions < _PRESETS[preset][1]:
        words.append(f"batch.sequence_length={num_positions}")
    return [word for word in words if word.partition("=")[0] not in keys]


def load_hugging_face_model(file: Path) -> tuple[ModelConfig, int]:
    """Return the model of a config.json, named after its directory, and its number of positions.

    Raises:
        ConfigError: The file cannot be read, or the model is not supported.
    """
    content = load_untrusted_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{format_value(file, 200)} cannot be read: it is not a JSON object")
    model, num_positions, _ = parse_hf_config(content, format_value(file, 200))
    directory = file.absolute().parent.name
    is_name = directory.replace("-", "").replace(".", "").replace("_", "").isalnum()
    name = directory if is_name and not directory.startswith(".") else model.family
    return replace(model, name=name), num_positions


def _find_nearest_preset(num_parameters: int) -> str:
    return min(_PRESETS, key=lambda name: abs(math.log(_PRESETS[name][0] / num_parameters)))
