"""What makes a run the run it is: the settings that may not change when it goes on, and those whose change is told.

A run's folder follows from its name, and without a name from a digest of the settings that fix its numbers. So the same
command finds its run again, another learning rate gets a folder of its own, and neither the layout nor the length counts.
"""

import dataclasses
import enum
import hashlib
import json
from typing import Any

from hlat.config.run import Config


def fixed(config: Config) -> dict[str, Any]:
    """Return the settings that a saved state depends on, by full key: changing one makes another run."""
    data = {
        "data.sources": config.data.sources,
        "data.tokenizer": config.data.tokenizer,
        "data.text_column": config.data.text_column,
        "data.eos_token": config.data.eos_token,
        "data.heldout_documents": config.data.heldout_documents,
    }
    batch = {
        "batch.global_batch_size": config.batch.global_batch_size,
        "batch.sequence_length": config.batch.sequence_length,
    }
    return _plain({**_group(config, "model"), **batch, **data, "run.seed": config.run.seed})


def adjustable(config: Config) -> dict[str, Any]:
    """Return the settings that change the numbers from here on, by full key: allowed, but told."""
    groups = ("precision", "phase", "optimizer", "schedule")
    return _plain({key: value for group in groups for key, value in _group(config, group).items()})


def default_name(config: Config) -> str:
    """Return the name of a run that was given none: the model and a digest of what fixes its numbers."""
    text = json.dumps({**fixed(config), **adjustable(config)}, sort_keys=True)
    return f"{config.model.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _group(config: Config, group: str) -> dict[str, Any]:
    section = getattr(config, group)
    return {
        f"{group}.{field.name}": getattr(section, field.name)
        for field in dataclasses.fields(section)
    }


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
