"""What makes a run the run it is: what may not change when it goes on, and what may.

A run's folder follows from its name, and without a name from a digest of the settings that fix its
numbers. So the same command finds its run again, another learning rate gets a folder of its own,
and neither the layout nor the length counts.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.config.plain import from_plain
from hlat.config.run import Config

ORIGIN = {"model.init_from": None, "model.init_copies": "equal"}
"""The settings that say which weights the first step found, as they are unless they are set."""


def fixed(config: Config) -> dict[str, Any]:
    """Return, by full key, what saved tensors depend on: changing it makes another run.

    What the saved position in the data depends on is the loader's own fingerprint.
    """
    settings = _group(config, "model")
    # runs from before there were these keys keep their names
    return {key: v for key, v in settings.items() if key not in ORIGIN or v != ORIGIN[key]}


def model(fixed: Mapping[str, Any]) -> Model:
    """Return the model that was saved with the settings `fixed`.

    Raises:
        ConfigError: Another version of hlat, with other settings, wrote them.
    """
    try:
        fields = {key: value for key, value in fixed.items() if key.startswith("model.")}
        return from_plain(Model, {key.removeprefix("model."): v for key, v in fields.items()})
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the model was saved by another version of hlat ({str(error).splitlines()[0]})"
        ) from error


def adjustable(config: Config) -> dict[str, Any]:
    """Return the settings that change the numbers from here on, by full key: allowed, but told."""
    groups = ("precision", "phase", "optimizer", "schedule")
    settings = {key: value for group in groups for key, value in _group(config, group).items()}
    data = config.data
    settings |= {f"data.sources.{name}.weight": s.weight for name, s in data.sources.items()}
    masks = {"data.document_mask": data.document_mask, "data.loss_mask": data.loss_mask}
    return settings | masks


def default_name(config: Config) -> str:
    """Return the name of a run without one: its model and a digest of what fixes its numbers."""
    batch = (config.batch.global_batch_size, config.batch.sequence_length)
    data = {k: v for k, v in _group(config, "data").items() if k not in _WHERE_AND_HOW}
    origin = (config.run.seed, config.checkpoint.start_from)
    settings = [fixed(config), adjustable(config), data, batch, origin]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{config.model.name}-{digest[:8]}"


_WHERE_AND_HOW = (
    "data.root",
    "data.encoder",
    "data.workers",
    "data.prefetch",
    "data.warn_epochs",
    "data.allow_changed",
    "data.preview",
)
"""Settings of the data group that do not touch the tokens."""


def _group(config: Config, group: str) -> dict[str, Any]:
    section = getattr(config, group)
    names = [field.name for field in dataclasses.fields(section)]
    return {f"{group}.{name}": _plain(getattr(section, name)) for name in names}


def _plain(value: Any) -> Any:
    """Return `value` as JSON knows it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
