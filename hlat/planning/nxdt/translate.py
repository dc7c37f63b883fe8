"""The equivalent of a run of NxDT, in which no key of its file is dropped in silence.

A key is said by overrides, or needs none, or has no equivalent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hlat.config.run import Config
from hlat.planning.nxdt.file import MODEL_CONFIG, File, Unresolved
from hlat.planning.nxdt.outcome import REMOVED, Kind, Outcome, copied_to, left, needless
from hlat.planning.nxdt.tables import ABSENT, KEYS, NEEDLESS, ONLY, READ_FOR, WITHOUT
from hlat.planning.nxdt.words import written

_FEATURES = {
    "moe": "mixture of experts",
    "peft": "LoRA",
    "dpo": "DPO",
    "orpo": "ORPO",
    **dict.fromkeys(("sft", "packing", "use_sft_style_data_module"), "supervised fine-tuning"),
}
"""What a run has that has a section, or a key, of this name."""

_OTHER_DECODER = ("normalization", "activation", "position_embedding_type", "has_bias")
_SHAPE = (
    *("num_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
_ALWAYS = {"phase": "base", "data": "files", "compiler": "neuron_2_28"}
"""NxDT has no phases; its text is the user's own; the SDK is the one that AWS pins for it."""
_UNKNOWN_DATA = {
    "data.sources.files.paths": "Arrow or Parquet files of text, such as [my/folder]",
    "data.tokenizer": "the tokenizer.json that text is read with",
    "data.eos_token": "the token after each document, such as </s>",
}
STAND_INS = {
    "data.sources.files.paths": "[text]",
    "data.tokenizer": "tokenizer.json",
    "data.eos_token": "end",
    "model.vocab_size": "32000",
}
"""Values that let a configuration be checked although its user has not said them yet."""


@dataclass(frozen=True)
class Listed:
    """A key of the file, and what is to be said of it."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Translation:
    """A run of NxDT in terms of hlat.

    Attributes:
        lacking: Features of the run that hlat does not have.
        overrides: Keys of hlat with their values, which train what is left of it.
        unset: Keys that the file does not know the value of, with what to set.
        said: Keys that overrides say, with what to know about that.
        left: Keys without an equivalent.
        needless: Keys that need none.
    """

    lacking: Sequence[str]
    overrides: Mapping[str, Any]
    unset: Mapping[str, str]
    said: Sequence[Listed]
    left: Sequence[Listed]
    needless: Sequence[Listed]


def translate(file: File, presets: Mapping[str, Mapping[str, Any]]) -> Translation:
    """Return what to tell hlat for the run that a file of NxDT describes.

    Args:
        file: The file; defaults are added to it.
        presets: The model group's choices by name, each with the fields of the model.
    """
    absent = _absent(file)
    file = File(file.leaves, absent)
    listed: dict[Kind, list[Listed]] = {kind: [] for kind in Kind}
    overrides: dict[str, Any] = dict(_ALWAYS)
    for key, value in {**file.leaves, **absent}.items():
        kind, said, reason = _outcome(key, value, file)
        overrides |= said
        if key in file.leaves:
            listed[kind].append(Listed(key, getattr(value, "text", value), reason))
        elif reason and kind is not Kind.needless:
            listed[kind].append(Listed(key, value, f"not set, so this; {reason}"))
    overrides = _with_preset(overrides, presets)
    if "model" in overrides and "model.vocab_size" not in overrides:
        size, why = presets[overrides["model"]]["vocab_size"], "NxDT takes the tokenizer's, padded"
        listed[Kind.mapped].append(Listed("model.vocab_size", size, f"the preset's; {why}"))
    return Translation(
        _lacking(file),
        overrides,
        _unset(file, overrides),
        listed[Kind.mapped],
        listed[Kind.left],
        listed[Kind.needless],
    )


def words(
    overrides: Mapping[str, Any],
    unset: Mapping[str, str] | None = None,
    stand_ins: Mapping[str, str] | None = None,
) -> list[str]:
    """Return overrides as hlat.train takes them, group by group, each group's choice first.

    Args:
        overrides: Keys and values.
        unset: Keys that only the user knows, written as `???`.
        stand_ins: What is written in place of that.

    Raises:
        TypeError: A value is of a type that no key of hlat has.
        ValueError: A value cannot be written.
    """
    groups = [field.name for field in fields(Config)]
    texts = {key: value if value is REMOVED else written(value) for key, value in overrides.items()}
    texts |= {key: (stand_ins or {}).get(key, "???") for key in unset or {}}
    ordered = sorted(texts, key=lambda key: (groups.index(group_of(key)), "." in key))
    return [key if texts[key] is REMOVED else f"{key}={texts[key]}" for key in ordered]


def group_of(override: str) -> str:
    """Return the group that an override, or its key, is about."""
    return re.split(r"[.=]", override.lstrip("+~"))[0]


def _absent(file: File) -> dict[str, Any]:
    """What NxDT takes for what the file does not have."""
    own = "hf" if file.hf else "megatron"
    known = any(key.startswith(MODEL_CONFIG) for key in file.leaves)
    return {
        key: value
        for key, value in (ABSENT["both"] | ABSENT[own]).items()
        if key not in file.leaves and (known or not key.startswith(MODEL_CONFIG))
    }


def _outcome(key: str, value: Any, file: File) -> Outcome:
    """What becomes of a key."""
    if key in NEEDLESS:
        return needless(NEEDLESS[key])
    reasons = [reason for name, reason in WITHOUT.items() if key == name or _below(key, name)]
    if reasons:
        return needless("it is not set") if value is None else left(reasons[0])
    other = "megatron" if file.hf else "hf"
    if key in READ_FOR[other]:
        return needless(f"NxDT reads it for {other} models only")
    if isinstance(value, Unresolved):
        return left("its value is not known here")
    try:
        outcome = _decided(key, value, file)
        words(outcome.overrides)
    except (TypeError, ValueError, ArithmeticError):
        return left("not a value that can be used")
    return outcome


def _decided(key: str, value: Any, file: File) -> Outcome:
    if key in ONLY:
        usual, reason = ONLY[key]
        return needless("as in hlat") if value in usual else left(reason)
    to = KEYS.get(key)
    if to is None:
        return left()
    return copied_to(to, value) if isinstance(to, str) else to(file, value)


def _below(key: str, name: str) -> bool:
    """Whether a table's name means all keys below it, this one too."""
    return name.endswith(".") and f"{key}.".startswith(name)


def _with_preset(
    overrides: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Let a preset of the same shape say what it says; the vocabulary may be all that is open."""
    shape = {key: overrides[f"model.{key}"] for key in _SHAPE if f"model.{key}" in overrides}
    if not set(_SHAPE) - set(shape) <= {"vocab_size"}:
        return overrides
    for name, preset in presets.items():
        if all(preset[key] == value for key, value in shape.items()):
            said = {f"model.{key}": value for key, value in preset.items() if key != "name"}
            rest = {
                key: value
                for key, value in overrides.items()
                if key != "model.name" and not (key in said and said[key] == value)
            }
            return {"model": name, **rest}
    return overrides


def _unset(file: File, overrides: Mapping[str, Any]) -> dict[str, str]:
    """What only the user knows, and where to find it."""
    missing = {key: why for key, why in _UNKNOWN_DATA.items() if key not in overrides}
    if "model" in overrides:
        return missing
    where = "in the config.json of model.model_config" if file.hf else "in no key of the file"
    for key in _SHAPE:
        if f"model.{key}" not in overrides:
            tokens = key == "vocab_size" and not file.hf
            missing[f"model.{key}"] = "at least the tokenizer's size" if tokens else where
    return missing


def _lacking(file: File) -> list[str]:
    """Features of the run that hlat does not have, in words."""
    known = {key: value for key, value in file.leaves.items() if value not in (None, False)}
    parts = {part for key in known for part in key.split(".")}
    if file.hf and "mixtral" in str(file.get("name")):
        parts.add("moe")
    found = list(dict.fromkeys(words for name, words in _FEATURES.items() if name in parts))
    if any(key.endswith("context_parallel_size") and known[key] != 1 for key in known):
        found.append("context parallelism")
    if not file.hf and any(
        file.get(f"model.{key}") not in ONLY[f"model.{key}"][0] for key in _OTHER_DECODER
    ):
        found.append("a decoder that is not Llama's")
    return found
