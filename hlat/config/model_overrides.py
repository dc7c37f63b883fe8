"""Overrides of a command line that select a model: a preset, and the settings that differ."""

import json
import re
from typing import Any

from hlat.config.compose import compose_config, load_model_presets
from hlat.config.config_json import parse_section
from hlat.config.model import ModelConfig
from hlat.config.run_identity import INITIAL_WEIGHTS_DEFAULTS, flatten_model


def format_model_overrides(model: ModelConfig, preset: str | None = None) -> list[str]:
    """Return overrides of `hlat train` that configure a model, without its initial weights.

    Without a preset, it is that of the model's name, or the default if no preset has this name.
    """
    presets = load_model_presets()
    name = preset or (model.name if model.name in presets else compose_config([]).model.name)
    defaults = flatten_model(parse_section(ModelConfig, presets[name]))
    return [
        f"model={name}",
        *(
            format_override(key, value)
            for key, value in flatten_model(model).items()
            if key not in INITIAL_WEIGHTS_DEFAULTS and value != defaults[key]
        ),
    ]


def format_override(key: str, value: Any) -> str:
    """Return an override in Hydra's grammar, without quotes around a plain word or path."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    return f"{key}={value if is_plain else json.dumps(value, ensure_ascii=False)}"
