"""Translation of NxDT keys with other values in hlat: cases in nxdt_keys.yaml, and functions.

Meanings follow the code of NxDT that reads the keys.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hlat.config.components import list_components
from hlat.config.conditions import are_met, resolve_references
from hlat.config.untrusted_files import load_untrusted_yaml
from hlat.optim.optimizer_spec import OptimizerSpec
from hlat.plan.nxdt.nxdt_config import NxdtConfig

_FP32_OPERATORS = ["norm", "softmax", "logits", "loss"]
"""Operators that NxDT computes in double, which XLA_DOWNCAST_BF16 makes fp32 on the device."""
_STOCHASTIC_ROUNDING_TYPES = ("mixed_precisionSR", "mixed_precision_SR")


class TranslationStatus(Enum):
    """Status of a translated key."""

    mapped = "mapped"
    """Expressed by overrides."""
    redundant = "redundant"
    """Default behavior of hlat, or not read by NxDT."""
    unsupported = "unsupported"
    """Without an equivalent."""


class KeyTranslation(NamedTuple):
    """Overrides that are equivalent to a key and its value, with a note or the reason for none."""

    status: TranslationStatus
    overrides: Mapping[str, Any]
    reason: str = ""


@cache
def load_key_tables() -> dict[str, Any]:
    """Return the tables of nxdt_keys.yaml by name, each by key."""
    tables: dict[str, Any] = load_untrusted_yaml(Path(__file__).with_name("nxdt_keys.yaml"))
    by_reason = tables["redundant"].items()
    tables["redundant"] = {key: reason for reason, keys in by_reason for key in keys}
    by_keys = tables["cases"].items()
    tables["cases"] = {key: cases for keys, cases in by_keys for key in keys.split(", ")}
    tables["cases"] |= {key: [{"map": {to: "$value"}}] for key, to in tables["copied"].items()}
    tables["source_specific"]["megatron"] += tables["defaults"]["megatron"]
    return tables


def map_to(overrides: Mapping[str, Any], note: str = "") -> KeyTranslation:
    """Return equivalent overrides with an optional note."""
    return KeyTranslation(TranslationStatus.mapped, overrides, note)


def mark_redundant(reason: str = "it is not set") -> KeyTranslation:
    """Return no overrides for a key that needs none."""
    return KeyTranslation(TranslationStatus.redundant, {}, reason)


def mark_unsupported(reason: str = "no equivalent") -> KeyTranslation:
    """Return no overrides for a key that changes the run."""
    return KeyTranslation(TranslationStatus.unsupported, {}, reason)


def translate_by_cases(
    cases: Sequence[Mapping[str, Any]], config: NxdtConfig, value: Any
) -> KeyTranslation:
    """Return the translation by the first case with all conditions met.

    Raises:
        TypeError: A value cannot be compared.
        ValueError: No case applies.
    """

    def get(key: str) -> Any:
        return value if key == "value" else config.get(key)

    for case in cases:
        if not are_met(case.get("if", {}), get):
            continue
        if "map" not in case:
            (status,) = set(case) - {"if"}
            reason = resolve_references(case[status], get)
            return KeyTranslation(TranslationStatus[status], {}, reason)
        overrides = {key: resolve_references(item, get) for key, item in case["map"].items()}
        if any(overrides[key] is None is not item for key, item in case["map"].items()):
            return mark_unsupported("it is not set")
        return map_to(overrides, resolve_references(case.get("note", ""), get))
    raise ValueError("no case applies")


def _translate_val_check_interval(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the evaluation interval; null if no evaluation falls into the run."""
    if not isinstance(value, int):
        return mark_unsupported("a fraction of an epoch; hlat counts steps")
    is_reached = value <= config.get("trainer.max_steps", value)
    is_used = config.get("trainer.limit_val_batches") and is_reached
    return map_to({"evaluation.every_steps": value if is_used else None})


def _translate_limit_val_batches(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the number of global batches per evaluation."""
    if value == 0:
        return mark_redundant("part of evaluation.every_steps")
    key = "evaluation.sequences_per_source"
    if not isinstance(value, int):
        return mark_unsupported(f"a fraction of the validation set; set {key}")
    return map_to({key: value * config.get("data.global_batch_size")})


def _translate_explicit_log_dir(config: NxdtConfig, value: Any) -> KeyTranslation:
    if value is None:
        return mark_redundant()
    path = PurePosixPath(str(value))
    return map_to({"run.root": str(path.parent), "run.name": path.name})


def _translate_tokenizer(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate a Hugging Face directory; other values are names of tokenizer libraries."""
    if "/" not in str(value):
        return mark_unsupported("set data.tokenizer to a tokenizer.json")
    return map_to({"data.tokenizer": f"{str(value).rstrip('/')}/tokenizer.json"})


def _translate_model_config(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the path of an hf model's config.json; its keys are separate entries."""
    if config.has_model_config:
        return mark_redundant("read")
    return mark_unsupported("not found there or beside the YAML; it sets the values marked ???")


def _translate_betas(config: NxdtConfig, value: Any) -> KeyTranslation:
    beta1, beta2 = value
    return map_to({"optimizer.beta1": beta1, "optimizer.beta2": beta2})


def _translate_optimizer(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the name; the state of ..._fp32OptState is fp32 for weights of any dtype."""
    specs: dict[str, OptimizerSpec] = {one.kind: one.spec for one in list_components("optimizer")}
    name = next((name for name, spec in specs.items() if value in spec.nxdt_names), None)
    if name is None:
        titles = ", ".join(spec.title for spec in specs.values())
        return mark_unsupported(f"hlat supports only {titles}")
    is_bf16 = build_precision_recipe(config).get("precision") == "bf16"
    note = "fp32 moments of bf16 weights; hlat stores both in the same dtype"
    is_mixed = str(value).endswith("_fp32OptState") and is_bf16
    return map_to({"optimizer.name": name}, note if is_mixed else "")


def _translate_lr_schedule(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate NeMo's CosineAnnealing, a linear decay to zero, or none: a constant peak."""
    warmup = config.get("model.optim.sched.warmup_steps", 0)
    schedule: tuple[str, Any, float | None]
    if value is None:
        schedule = ("constant", 0, None)
    elif value == "LinearAnnealingWithWarmUp":
        schedule = ("linear", warmup, 0)
    elif value == "CosineAnnealing":
        ratio = config.get("model.optim.sched.min_lr", 0) / config.get("model.optim.lr", 0)
        schedule = ("cosine", warmup, float(f"{ratio:.12g}"))
    else:
        return mark_unsupported("hlat has cosine, linear, constant and wsd")
    keys = ("schedule.name", "schedule.warmup_steps", "schedule.min_lr_ratio")
    return map_to(dict(zip(keys, schedule, strict=True)) | {"schedule.decay_steps": None})


def build_precision_recipe(config: NxdtConfig) -> dict[str, Any]:
    """Return the recipe as overrides; empty if NxDT does not support the type.

    Master weights and fp32 sums require zero1 (model/base.py). XLA_USE_BF16 converts every float
    and double to bf16, XLA_DOWNCAST_BF16 floats to bf16 and doubles to fp32. Without either, hf
    models are cast to bf16 (llama_model.py) and Megatron's stay in fp32.
    """
    precision = config.get("precision.type")
    zero1 = bool(config.get("distributed_strategy.zero1", True))
    if precision == "fp32":
        return {"precision": "fp32"}
    if precision == "bf16SR":
        return {"precision": "bf16_sr"}
    if precision in ("mixed_precision", "autocast", *_STOCHASTIC_ROUNDING_TYPES):
        return _build_bf16_recipe(zero1, zero1, precision in _STOCHASTIC_ROUNDING_TYPES)
    if precision != "manual":
        return {}
    stochastic = _is_enabled(config, "neuron_rt_stochastic_rounding_en")
    if _is_enabled(config, "xla_use_bf16"):
        return {"precision": "bf16_sr" if stochastic else "bf16"}
    if not config.is_hf and not _is_enabled(config, "xla_downcast_bf16"):
        return {"precision": "fp32"}
    return _build_bf16_recipe(
        zero1 and _is_enabled(config, "master_weights"),
        zero1 and _is_enabled(config, "fp32_grad_acc"),
        stochastic,
    )


def _is_enabled(config: NxdtConfig, key: str) -> bool:
    """Return True if a flag of the precision section is on; some are strings."""
    return str(config.get(f"precision.{key}")).lower() in ("1", "true")


def _build_bf16_recipe(
    master_weights: bool, fp32_accumulation: bool, stochastic: bool
) -> dict[str, Any]:
    if master_weights:
        recipe: dict[str, Any] = {"precision": "mixed"}
        other = {} if fp32_accumulation else {"grad_accum_dtype": "bf16", "reduce_dtype": "bf16"}
        if stochastic:
            other["rounding"] = "stochastic"
    else:
        recipe = {
            "precision": "bf16_sr" if stochastic else "bf16",
            "precision.fp32_operators": _FP32_OPERATORS,
        }
        other = {"grad_accum_dtype": "fp32", "reduce_dtype": "fp32"} if fp32_accumulation else {}
    return recipe | {f"precision.{key}": value for key, value in other.items()}


def _translate_precision(config: NxdtConfig, value: Any) -> KeyTranslation:
    recipe = build_precision_recipe(config)
    if not recipe:
        return mark_unsupported("unknown to NxDT")
    return map_to(recipe, load_key_tables()["precision_notes"].get(value, ""))


def _translate_compiler_flags(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate NEURON_CC_FLAGS with the flags that NxDT adds for the precision."""
    added = load_key_tables()["cc_flags"].get(config.get("precision.type"), "")
    return map_to({"compiler.cc_flags": f"{value or ''} {added}".split()})


RULES: dict[str, Callable[[NxdtConfig, Any], KeyTranslation]] = {
    "trainer.val_check_interval": _translate_val_check_interval,
    "trainer.limit_val_batches": _translate_limit_val_batches,
    "exp_manager.explicit_log_dir": _translate_explicit_log_dir,
    "data.tokenizer.type": _translate_tokenizer,
    "model.model_config": _translate_model_config,
    "model.optim.name": _translate_optimizer,
    "model.optim.betas": _translate_betas,
    "model.optim.sched.name": _translate_lr_schedule,
    "precision.type": _translate_precision,
    "compiler_flags": _translate_compiler_flags,
    "neuron_experimental_compress_rg": lambda config, value: map_to(
        {"++compiler.environment.NEURON_EXPERIMENTAL_COMPRESS_RG": int(value is True)}
    ),
}
"""Rule of each key whose translation needs more than a comparison."""
