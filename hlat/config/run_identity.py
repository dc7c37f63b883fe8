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

INITIAL_WEIGHTS_DEFAULTS = {"model.init_from": None, "model.init_copies": "equal"}
"""Default values of the settings that select the initial weights."""
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
    the initial weights are omitted, as older runs lack these keys.
    """
    defaults = INITIAL_WEIGHTS_DEFAULTS.items()
    return dict(item for item in _collect_group(config, "model").items() if item not in defaults)


def build_saved_model_config(fixed_settings: Mapping[str, Any]) -> ModelConfig:
    """Return the model that was saved with `fixed_settings`.

    Raises:
        ConfigError: The settings are from another version of hlat.
    """
    try:
        items = fixed_settings.items()
        fields = {k.removeprefix("model."): v for k, v in items if k.startswith("model.")}
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
    data = _collect_group(config, "data")
    settings = [
        collect_fixed_settings(config),
        collect_adjustable_settings(config),
        {k: v for k, v in data.items() if k not in _SETTINGS_WITHOUT_EFFECT_ON_TOKENS},
        (config.batch.global_batch_size, config.batch.sequence_length),
        (config.run.seed, config.checkpoint.start_from),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{config.model.name}-{digest[:8]}"


def _collect_group(config: Config, group: str) -> dict[str, Any]:
    """Return the fields of a group by full key as JSON."""
    fields = dataclasses.asdict(getattr(config, group))
    plain = json.loads(json.dumps(fields, default=attrgetter("value")))
    return {f"{group}.{name}": value for name, value in plain.items()}
