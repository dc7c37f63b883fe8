"""Translation of an NxDT configuration, which reports every key of the file."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hlat.config.run import Config
from hlat.config.untrusted_files import format_value
from hlat.figures.page_templates import render_text
from hlat.plan.nxdt.nxdt_config import MODEL_CONFIG_PREFIX, NxdtConfig, UnresolvedValue
from hlat.plan.nxdt.translation_rules import (
    RULES,
    KeyTranslation,
    TranslationStatus,
    load_key_tables,
    mark_redundant,
    mark_unsupported,
    translate_by_cases,
)

_DECODER_KEYS = (
    *("model.normalization", "model.activation", "model.position_embedding_type"),
    "model.has_bias",
)
_SHAPE_KEYS = (
    *("num_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
PLACEHOLDERS = {
    "data.sources.files.paths": "[text]",
    "data.tokenizer": "tokenizer.json",
    "data.eos_token": "end",
    "model.vocab_size": "32000",
}
"""Values that complete a configuration for validation until the user sets them."""

_UNQUOTED_STRING = re.compile(
    r"(?!(?:true|false|null|inf|infinity|nan|\d[\d_]*\.?[\d_]*(?:e-?[\d_]+)?)$)(?:--)?[\w/][\w./-]*",
    re.ASCII | re.IGNORECASE,
)
"""Strings that Hydra does not parse as a value of another type."""


class ReportedKey(NamedTuple):
    """Key of the file with its value and a remark."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Translation:
    """NxDT run in terms of hlat.

    `unset` contains the keys of hlat whose values the file does not contain, with what to set; the
    keys of the file are either mapped, with remarks, unsupported or redundant.
    """

    missing_features: Sequence[str]
    overrides: Mapping[str, Any]
    unset: Mapping[str, str]
    mapped: Sequence[ReportedKey]
    unsupported: Sequence[ReportedKey]
    redundant: Sequence[ReportedKey]


def translate_nxdt_config(
    config: NxdtConfig, presets: Mapping[str, Mapping[str, Any]]
) -> Translation:
    """Return the translation of an NxDT configuration.

    Args:
        config: Configuration; defaults are added to it.
        presets: Presets of the model group by name, with the fields of ModelConfig.
    """
    defaults = _find_defaults(config)
    config = NxdtConfig(config.settings, defaults)
    reported: dict[TranslationStatus, list[ReportedKey]] = {key: [] for key in TranslationStatus}
    mapped, redundant, unsupported = reported.values()
    overrides: dict[str, Any] = dict(load_key_tables()["common_overrides"])
    for key, value in {**config.settings, **defaults}.items():
        status, key_overrides, reason = _translate_key(key, value, config)
        overrides |= key_overrides
        if key in config.settings:
            reported[status].append(ReportedKey(key, getattr(value, "text", value), reason))
        elif reason and status is not TranslationStatus.redundant:
            reported[status].append(ReportedKey(key, value, f"default, not set; {reason}"))
    overrides = _apply_preset(overrides, presets)
    if "model" in overrides and "model.vocab_size" not in overrides:
        size = presets[overrides["model"]]["vocab_size"]
        reason = "the preset's; NxDT uses the tokenizer's, padded"
        mapped.append(ReportedKey("model.vocab_size", size, reason))
    return Translation(
        _find_missing_features(config),
        overrides,
        _find_unset_keys(config, overrides),
        mapped,
        unsupported,
        redundant,
    )


def format_overrides(
    overrides: Mapping[str, Any],
    unset: Mapping[str, str] | None = None,
    placeholders: Mapping[str, str] | None = None,
) -> list[str]:
    """Return overrides for the command line of hlat train, sorted by group.

    The user sets the keys of `unset`, with the value `???`, or one of `placeholders`.

    Raises:
        TypeError: If no key of hlat has the type of a value.
        ValueError: If a value cannot be represented.
    """
    groups = [field.name for field in fields(Config)]
    words = {
        key: key if key.startswith("~") else f"{key}={format_override_value(value)}"
        for key, value in overrides.items()
    }
    words |= {key: f"{key}={(placeholders or {}).get(key, '???')}" for key in unset or {}}
    order = sorted(words, key=lambda key: (groups.index(get_config_group(key)), "." in key))
    return [words[key] for key in order]


def format_override_value(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides.

    Raises:
        TypeError: If no key of hlat has the type.
        ValueError: If a string is not printable or contains an interpolation.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(format_override_value, value))}]"
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not a type of a configuration value")
    if not value.isprintable() or "${" in value:
        raise ValueError(f"{value!r} is not printable or contains an interpolation")
    if _UNQUOTED_STRING.fullmatch(value):
        return value
    escaped = re.sub(r'(\\*)("|$)', lambda end: end[1] * 2 + ('\\"' if end[2] else ""), value)
    return f'"{escaped}"'


def get_config_group(override: str) -> str:
    """Return the configuration group of an override or a key."""
    return re.split(r"[.=]", override.lstrip("+~"))[0]


def _find_defaults(config: NxdtConfig) -> dict[str, Any]:
    """Return NxDT's defaults of keys that the file does not contain."""
    defaults = load_key_tables()["defaults"]
    return {
        key: value
        for key, value in (
            defaults["both"] | defaults["hf" if config.is_hf else "megatron"]
        ).items()
        if key not in config.settings
        and (config.has_model_config or not key.startswith(MODEL_CONFIG_PREFIX))
    }


def _translate_key(key: str, value: Any, config: NxdtConfig) -> KeyTranslation:
    tables = load_key_tables()
    if key in tables["redundant"]:
        return mark_redundant(tables["redundant"][key])
    for name, reason in tables["unsupported"].items():
        if key == name or (name.endswith(".") and f"{key}.".startswith(name)):
            return mark_redundant() if value is None else mark_unsupported(reason)
    other_source = "megatron" if config.is_hf else "hf"
    if key in tables["source_specific"][other_source]:
        return mark_redundant(f"NxDT reads it for {other_source} models only")
    if isinstance(value, UnresolvedValue):
        return mark_unsupported("the value is unknown")
    if key in tables["supported_values"]:
        values, reason = tables["supported_values"][key]
        return mark_redundant("as in hlat") if value in values else mark_unsupported(reason)
    try:
        if key in tables["cases"]:
            result = translate_by_cases(tables["cases"][key], config, value)
        elif key in RULES:
            result = RULES[key](config, value)
        else:
            return mark_unsupported()
        format_overrides(result.overrides)
    except (TypeError, ValueError, ArithmeticError):
        return mark_unsupported("not a usable value")
    return result


def _apply_preset(
    overrides: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Select the preset of the same shape, where only the vocabulary size may be unknown."""
    shape = {key: overrides[f"model.{key}"] for key in _SHAPE_KEYS if f"model.{key}" in overrides}
    if not set(_SHAPE_KEYS) - set(shape) <= {"vocab_size"}:
        return overrides
    for name, preset in presets.items():
        if all(preset[key] == value for key, value in shape.items()):
            implied = {f"model.{key}": value for key, value in preset.items() if key != "name"}
            return {"model": name} | {
                key: value
                for key, value in overrides.items()
                if key != "model.name" and not (key in implied and implied[key] == value)
            }
    return overrides


def _find_unset_keys(config: NxdtConfig, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys to be set by the user, with the source of the value."""
    unset = {
        key: hint
        for key, hint in load_key_tables()["user_supplied"].items()
        if key not in overrides
    }
    if "model" in overrides:
        return unset
    source = "in the config.json of model.model_config" if config.is_hf else "in no key of the file"
    for key in _SHAPE_KEYS:
        if f"model.{key}" not in overrides:
            is_vocabulary = key == "vocab_size" and not config.is_hf
            unset[f"model.{key}"] = "at least the tokenizer's size" if is_vocabulary else source
    return unset


def _find_missing_features(config: NxdtConfig) -> list[str]:
    """Return the names of features of the run that hlat does not support."""
    enabled = {key: value for key, value in config.settings.items() if value not in (None, False)}
    names = {name for key in enabled for name in key.split(".")}
    if config.is_hf and "mixtral" in str(config.get("name")):
        names.add("moe")
    known = load_key_tables()["unsupported_features"].items()
    features = [feature for feature, implied_by in known if names & set(implied_by)]
    if any(key.endswith("context_parallel_size") and enabled[key] != 1 for key in enabled):
        features.append("context parallelism")
    if not config.is_hf and any(
        config.get(key) not in load_key_tables()["supported_values"][key][0]
        for key in _DECODER_KEYS
    ):
        features.append("a decoder that is not Llama's")
    return list(dict.fromkeys(features))


def format_translation(name: str, translation: Translation, problems: Sequence[str]) -> list[str]:
    """Return the lines of the translation of a NxD Training file: command and unmapped keys.

    `problems` are the reasons why hlat.train rejects the command.
    """
    overrides = format_overrides(translation.overrides, translation.unset)
    *features, last_feature = translation.missing_features or [""]
    return render_text(
        Path(__file__).parent.with_name("templates") / "nxdt_translation.txt.j2",
        name=format_value(name),
        features=" and ".join(filter(None, [", ".join(features), last_feature])),
        groups=[shlex.join(group) for _, group in groupby(overrides, key=get_config_group)],
        unset=[*translation.unset.items()],
        noted=_build_rows(key for key in translation.mapped if key.reason),
        unsupported=_build_rows(translation.unsupported),
        redundant=_build_rows(translation.redundant),
        problems=problems,
    )


def _build_rows(keys: Iterable[ReportedKey]) -> list[tuple[str, str]]:
    """Return setting and reason of each key."""
    return [(f"{format_value(key.key, 100)}={format_value(key.value)}", key.reason) for key in keys]
