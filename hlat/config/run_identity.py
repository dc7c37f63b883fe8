"""Identity of a run: settings that are fixed, settings that may change on resume, default name.

The run directory is named after the run, or else after a digest of the settings that determine the
result. The same command therefore resumes its run, another learning rate has its own directory,
and the layout and the number of steps have no effect.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from hlat.config.batch import BatchConfig
from hlat.config.components import (
    SELECTORS,
    extend_schema,
    get_component,
    list_components,
    list_registered,
    list_unused_settings,
)
from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section
from hlat.config.data import DataConfig
from hlat.config.extensions import compute_hashes, format_missing_extension
from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig, RoleLearningRates
from hlat.config.renamed_keys import restore_former_keys
from hlat.config.run import Config, RunConfig
from hlat.config.schedule import RELATIVE_FIELDS

_DATA_DEFAULTS = {"data.bos_token": None, "data.domains": None, "data.heldout_domains": None}
"""Default values of data settings that older versions lack; omitted from the default run name."""
_OPTIMIZER_DEFAULTS = {"optimizer.ema_decay": None}
"""The same for settings of the optimizer."""
INITIAL_WEIGHTS_DEFAULTS = {
    "model.init_from": None,
    "model.init_copies": "equal",
    "model.mlp.moe.upcycling_noise": None,
}
"""Default values of the settings that select the initial weights."""
_RAMP_KEY = "batch.ramp"
_FIXED_DATA_KEYS = ("batch.global_batch_size", "batch.sequence_length", _RAMP_KEY)
"""Keys that must never change: a stream belongs to a row of the global batch, and the first step of
a stage depends on the tokens per step."""
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
    "data.max_lost_text",
    "data.allow_changed",
    "data.preview",
}


def collect_fixed_settings(config: Config) -> dict[str, Any]:
    """Return, by full key, the settings that determine the saved tensors.

    The loader has its own fingerprint of the settings that determine the data position. Defaults of
    the initial weights and of components are omitted, as older runs lack these keys; those of an
    extension are recorded, as its file may change.
    """
    defaults = INITIAL_WEIGHTS_DEFAULTS | flatten_model(type(config.model)())
    extended = tuple(f"{one.section}.{one.kind}." for one in list_components() if one.settings)
    return {
        key: value
        for key, value in _drop_unused(flatten_model(config.model), config).items()
        if key in _KEYS_OF_ALL_RUNS
        or value != defaults[key]
        or (key.startswith(extended) and key not in INITIAL_WEIGHTS_DEFAULTS)
    }


def flatten_model(model: ModelConfig) -> dict[str, Any]:
    """Return all settings of a model by full key as JSON."""
    return _flatten(_collect_fields(model), "model")


def build_saved_model_config(
    fixed_settings: Mapping[str, Any], config_yaml: str = ""
) -> ModelConfig:
    """Return the model that was saved with `fixed_settings`.

    Raises:
        ConfigError: The settings are from another version of hlat, or a component is that of an
            extension that is not loaded; the message has the path in `config_yaml`.
    """
    for group, selector in SELECTORS.items():
        kind = fixed_settings.get(f"{group}.{selector}")
        if kind is not None and (group, kind) not in list_registered():
            raise ConfigError(format_missing_extension(group, kind, config_yaml))
    try:
        fields: dict[str, Any] = {}
        for key, value in fixed_settings.items():
            group, *path, leaf = key.split(".")
            if group == "model":
                section = fields
                for name in path:
                    section = section.setdefault(name, {})
                section[leaf] = value
        return parse_section(extend_schema(ModelConfig, "model."), fields)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the model was saved by another version of hlat ({str(error).splitlines()[0]})"
        ) from error


def build_saved_optimizer_config(adjustable_settings: Mapping[str, Any]) -> OptimizerConfig:
    """Return name, settings and average of the optimizer saved with `adjustable_settings`.

    The values of all other fields, such as the learning rate, are not those of the run.

    Raises:
        ConfigError: The settings are from another version of hlat, or there is no such optimizer.
    """
    name = str(adjustable_settings.get("optimizer.name", OptimizerConfig.name))
    component = get_component("optimizer", name)
    ema_decay = adjustable_settings.get("optimizer.ema_decay")
    fields: dict[str, Any] = {"name": name, "lr": 1.0, "ema_decay": ema_decay}
    if component.settings is not None:
        fields[name] = adjustable_settings.get(f"optimizer.{name}", {})
    try:
        return parse_section(extend_schema(OptimizerConfig, "optimizer."), fields)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the optimizer was saved by another version of hlat ({str(error).splitlines()[0]})"
        ) from error


def collect_adjustable_settings(config: Config) -> dict[str, Any]:
    """Return, by full key, the settings that may change on resume; a change is logged."""
    settings: dict[str, Any] = {}
    for group in ("precision", "phase", "optimizer", "schedule"):
        settings |= _collect_group(config, group)
    for name in RELATIVE_FIELDS:  # null in a composed configuration, and absent in older runs
        del settings[f"schedule.{name}"]
    data = config.data
    settings |= {f"data.sources.{name}.weight": s.weight for name, s in data.sources.items()}
    masks = {"data.document_mask": data.document_mask, "data.loss_mask": data.loss_mask}
    if config.optimizer.lr_by_role == RoleLearningRates():  # as in runs without this setting
        del settings["optimizer.lr_by_role"]
    if config.batch.length_warmup.start is not None:
        settings["batch.length_warmup"] = _collect_fields(config.batch.length_warmup)
    return _drop_unused(settings, config) | masks | compute_hashes(config.extensions)


def collect_data_settings(data: DataConfig, batch: BatchConfig, seed: int) -> dict[str, Any]:
    """Return, by full key, the settings that determine the position in the data.

    The fingerprint of the data has hashes of tokenizer and sources besides.
    """
    return {
        "run.seed": seed,
        "batch.global_batch_size": batch.global_batch_size,
        "batch.sequence_length": batch.sequence_length,
        "data.eos_token": data.eos_token,
        "data.heldout_documents": data.heldout_documents,
        # Absent without BOS or ramp, as in checkpoints of versions without these settings
        **({} if data.bos_token is None else {"data.bos_token": data.bos_token}),
        **({} if batch.ramp.start is None else {_RAMP_KEY: _collect_fields(batch.ramp)}),
    }


def compare_data_settings(
    current: Mapping[str, Any], saved: Mapping[str, Any], allowed_keys: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the allowed differences by key, and the problems, of settings or fingerprints.

    With changed data, a saved position would repeat some documents and skip others. A difference is
    therefore a problem, unless data.allow_changed lists its key.
    """
    messages = {
        key: f"{key}: the checkpoint was written with {saved.get(key, 'none')}, this run has "
        f"{current.get(key, 'none')}"
        for key in sorted({*current, *saved})
        if current.get(key) != saved.get(key)
    }
    allowed = {*allowed_keys} - {*_FIXED_DATA_KEYS}
    accepted = {key: messages.pop(key) for key in [*messages] if key in allowed}
    return accepted, [f"{text}; {_format_remedy(key)}" for key, text in messages.items()]


def list_allowed_keys(*fingerprints: Mapping[str, Any]) -> list[str]:
    """Return the keys of fingerprints that data.allow_changed accepts."""
    return sorted({key for each in fingerprints for key in each} - {*_FIXED_DATA_KEYS})


def _format_remedy(key: str) -> str:
    if key in _FIXED_DATA_KEYS:
        return "restore the former, or start a new run"
    return f"restore the former, start a new run, or accept it with 'data.allow_changed=[{key}]'"


def find_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "key was x, is y" for each setting that differs."""
    return [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]


def build_default_run_name(config: Config) -> str:
    """Return the model's name and a digest of the settings that determine the result."""
    data = {
        key: value
        for key, value in _collect_group(config, "data").items()
        if key not in _SETTINGS_WITHOUT_EFFECT_ON_TOKENS
        and (key, value) not in _DATA_DEFAULTS.items()
    }
    adjustable = {
        key: value
        for key, value in collect_adjustable_settings(config).items()
        if (key, value) not in _OPTIMIZER_DEFAULTS.items()
    }
    settings = [
        collect_fixed_settings(config),
        restore_former_keys(adjustable),
        data,
        (config.batch.global_batch_size, config.batch.sequence_length),
        *([] if config.batch.ramp.start is None else [_collect_fields(config.batch.ramp)]),
        (config.run.seed, config.checkpoint.start_from),
        *_collect_own_seeds(config.run),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{config.model.name}-{digest[:8]}"


def _collect_own_seeds(run: RunConfig) -> list[dict[str, int]]:
    """Return the seeds that differ from run.seed; empty without, as in names of earlier runs."""
    seeds = {"init_seed": run.init_seed, "data_seed": run.data_seed}
    own = {name: seed for name, seed in seeds.items() if seed is not None}
    return [own] if own else []


def _drop_unused(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    """Omit the settings of components that the configuration does not select."""
    unused = tuple(list_unused_settings(config))
    return {key: value for key, value in settings.items() if not f"{key}.".startswith(unused)}


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
