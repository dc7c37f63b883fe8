"""Identity of a run: settings that are fixed, settings that may change on resume, default name.

The run directory is named after the run, or else after a digest of the settings that determine the
result. The same command therefore resumes its run, another learning rate has its own directory,
and the layout and the number of steps have no effect.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section
from hlat.config.model import ModelConfig
from hlat.config.run import Config

_DATA_DEFAULTS = {"data.bos_token": None}
"""Default values of data settings that older versions lack; omitted from the default run name."""
INITIAL_WEIGHTS_DEFAULTS = {"model.init_from": None, "model.init_copies": "equal"}
"""Default values of the settings that select the initial weights."""
_KEYS_OF_ALL_RUNS = {
    f"model.{name}"
    for name in (
        *("name", "num_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "rope_theta", "rms_norm_eps", "tie_embeddings"),
        *("init_std", "scaled_init"),
    )
}
"""Keys of the model that runs of every version of hlat record."""
_SETTINGS_WITHOUT_EFFECT_ON_TOKENS = {
    "data.root",
    "data.encoder",
    "data.workers",
    "data.prefetch",
    "data.warn_epochs",
    "data.allow_changed",
    "data.preview",
}


def collect_fixed_settings(config: Config) -> dict[str, Any]:
    """Return, by full key, the settings that determine the saved tensors.

    The loader has its own fingerprint of the settings that determine the data position. Defaults of
    the initial weights and of components are omitted, as older runs lack these keys.
    """
    defaults = INITIAL_WEIGHTS_DEFAULTS | flatten_model(ModelConfig())
    return {
        key: value
        for key, value in flatten_model(config.model).items()
        if key in _KEYS_OF_ALL_RUNS or value != defaults[key]
    }


def flatten_model(model: ModelConfig) -> dict[str, Any]:
    """Return all settings of a model by full key as JSON."""
    return _flatten(_collect_fields(model), "model")


def build_saved_model_config(fixed_settings: Mapping[str, Any]) -> ModelConfig:
    """Return the model that was saved with `fixed_settings`.

    Raises:
        ConfigError: The settings are from another version of hlat.
    """
    try:
        fields: dict[str, Any] = {}
        for key, value in fixed_settings.items():
            group, *path, leaf = key.split(".")
            if group == "model":
                section = fields
                for name in path:
                    section = section.setdefault(name, {})
                section[leaf] = value
        return parse_section(ModelConfig, fields)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the model was saved by another version of hlat ({str(error).splitlines()[0]})"
        ) from error


def collect_adjustable_settings(config: Config) -> dict[str, Any]:
    """Return, by full key, the settings that may change on resume; a change is logged."""
    settings: dict[str, Any] = {}
    for group in ("precision", "phase", "optimizer", "schedule"):
        settings |= _collect_group(config, group)
    data = config.data
    settings |= {f"data.sources.{name}.weight": s.weight for name, s in data.sources.items()}
    masks = {"data.document_mask": data.document_mask, "data.loss_mask": data.loss_mask}
    return settings | masks


def build_default_run_name(config: Config) -> str:
    """Return the model's name and a digest of the settings that determine the result."""
    data = {
        key: value
        for key, value in _collect_group(config, "data").items()
        if key not in _SETTINGS_WITHOUT_EFFECT_ON_TOKENS
        and (key, value) not in _DATA_DEFAULTS.items()
    }
    settings = [
        collect_fixed_settings(config),
        collect_adjustable_settings(config),
        data,
        (config.batch.global_batch_size, config.batch.sequence_length),
        (config.run.seed, config.checkpoint.start_from),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{config.model.name}-{digest[:8]}"


def _collect_group(config: Config, group: str) -> dict[str, Any]:
    """Return the fields of a group by full key as JSON."""
    fields = _collect_fields(getattr(config, group))
    return {f"{group}.{name}": value for name, value in fields.items()}


def _collect_fields(section: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON."""
    fields: dict[str, Any] = json.loads(
        json.dumps(dataclasses.asdict(section), default=attrgetter("value"))
    )
    return fields


def _flatten(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the fields of nested groups by full key."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        key = f"{prefix}.{name}"
        flat |= _flatten(value, key) if isinstance(value, dict) else {key: value}
    return flat
