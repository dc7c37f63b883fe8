"""Translation of NxDT keys whose values are not copied, from the code of NxDT that reads them."""

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from hlat.plan.nxdt.nxdt_config import MODEL_CONFIG_PREFIX, NxdtConfig
from hlat.plan.nxdt.nxdt_precision import (
    PRECISION_NOTES,
    STOCHASTIC_ROUNDING_TYPES,
    build_precision_recipe,
)

REMOVE_KEY = object()
"""Value of an override that removes a key."""
_CC_FLAGS = {
    **dict.fromkeys(
        ("bf16SR", "mixed_precision", *STOCHASTIC_ROUNDING_TYPES),
        "--enable-mixed-precision-accumulation",
    ),
    "autocast": "--enable-mixed-precision-accumulation --auto-cast none",
    "fp32": "--auto-cast none",
}
"""Flags that NxDT adds to compiler_flags, by precision.type (training_orchestrator.py)."""
_HARDWARE_PRESETS = {32: "trn1_32xl", 64: "trn2_48xl"}
"""Presets by devices per node; a trn2 node has 64 with two cores each (lnc 2)."""


class TranslationStatus(Enum):
    """Status of a translated key."""

    mapped = "mapped"
    """Expressed by overrides."""
    redundant = "redundant"
    """Default behavior of hlat, or not read by NxDT."""
    unsupported = "unsupported"
    """Without an equivalent."""


class KeyTranslation(NamedTuple):
    """Translation of a key and its value.

    Attributes:
        status: Status of the key.
        overrides: hlat's keys and values; `REMOVE_KEY` removes a key.
        reason: Reason for the lack of overrides, or a note about them.
    """

    status: TranslationStatus
    overrides: Mapping[str, Any]
    reason: str = ""


TranslationRule = Callable[[NxdtConfig, Any], KeyTranslation]
"""Function of the configuration and the value of a key."""


def map_to(overrides: Mapping[str, Any], note: str = "") -> KeyTranslation:
    """Return equivalent overrides with an optional note."""
    return KeyTranslation(TranslationStatus.mapped, overrides, note)


def mark_redundant(reason: str = "it is not set") -> KeyTranslation:
    """Return no overrides for a key that needs none."""
    return KeyTranslation(TranslationStatus.redundant, {}, reason)


def mark_unsupported(reason: str = "no equivalent") -> KeyTranslation:
    """Return no overrides for a key that changes the run."""
    return KeyTranslation(TranslationStatus.unsupported, {}, reason)


def copy_to(key: str, value: Any) -> KeyTranslation:
    """Return an override of a key of hlat with the same value."""
    return mark_unsupported("it is not set") if value is None else map_to({key: value})


def _copy_unless_minus_one(key: str) -> TranslationRule:
    """Copy a number unless it is -1, which refers to model_config in hf models (llama_model.py)."""
    return lambda config, value: (
        mark_redundant("-1 refers to model_config") if value == -1 else copy_to(key, value)
    )


def _copy_unless_in_yaml(key: str) -> TranslationRule:
    """Copy a number of model_config unless the YAML sets the key of the same name as hlat's."""
    return lambda config, value: (
        mark_redundant(f"{key} takes precedence")
        if config.get(key, -1) != -1
        else copy_to(key, value)
    )


def _copy_unless_explicit_log_dir(key: str) -> TranslationRule:
    """Copy a part of the run directory unless explicit_log_dir sets all of it."""

    def rule(config: NxdtConfig, value: Any) -> KeyTranslation:
        if value is None:
            return mark_redundant()
        if config.get("exp_manager.explicit_log_dir") is not None:
            return mark_redundant("explicit_log_dir takes precedence")
        return map_to({key: value})

    return rule


def _translate_key_value_heads(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the number of key/value heads; null: one per query head."""
    prefix = MODEL_CONFIG_PREFIX if config.is_hf else "model."
    num_heads = config.get(f"{prefix}num_attention_heads") if value is None else value
    return copy_to("model.num_key_value_heads", num_heads)


def _translate_sequence_length(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate data.seq_length, which model.encoder_seq_length overrides."""
    encoder = config.get("model.encoder_seq_length")
    if encoder is None:
        return copy_to("batch.sequence_length", value)
    if encoder == value:
        return mark_redundant("equal to model.encoder_seq_length")
    return mark_unsupported(f"differs from model.encoder_seq_length={encoder}, which is used")


def _translate_sequence_parallel(config: NxdtConfig, value: Any) -> KeyTranslation:
    is_sharded = config.get("distributed_strategy.tensor_model_parallel_size", 1) > 1
    return map_to({"parallelism.sequence_parallel": bool(value) and is_sharded})


def _translate_sliding_window(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the attention window (megatron/transformer.py)."""
    if value in (None, config.get("model.encoder_seq_length")):
        return mark_redundant("the full sequence")
    return mark_unsupported("attention covers the full sequence")


def _translate_tokenizer(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate a Hugging Face directory; other values are names of tokenizer libraries."""
    if "/" not in str(value):
        return mark_unsupported("set data.tokenizer to a tokenizer.json")
    return map_to({"data.tokenizer": f"{str(value).rstrip('/')}/tokenizer.json"})


def _translate_virtual_pipeline(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the number of model chunks per rank; null is 1."""
    chunks = value or 1
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    key = "parallelism.pipeline_schedule"
    return map_to({"parallelism.stages_per_rank": chunks, key: schedule})


def _translate_activation_checkpointing(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the granularity, with the modules of a selective one."""
    mode, note = "none", ""
    if value == "full":
        mode = "full"
    elif value == "selective":
        if modules := config.get("model.activations_checkpoint_recompute"):
            mode = "selective"
            if set(modules) != {"CoreAttention", "ActivationMultiplyMLP"}:
                note = "hlat recomputes core attention and the SwiGLU product"
    elif config.is_hf and not config.get("model.fusions.flash_attention"):
        mode, note = "selective", "without flash attention NxDT recomputes core attention"
    return map_to({"parallelism.activation_checkpointing": mode}, note)


def _translate_betas(config: NxdtConfig, value: Any) -> KeyTranslation:
    beta1, beta2 = value
    return map_to({"optimizer.beta1": beta1, "optimizer.beta2": beta2})


def _translate_optimizer(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate AdamW; the moments of adamw_fp32OptState are fp32 for weights of any dtype."""
    if value not in ("adamw", "adamw_fp32OptState"):
        return mark_unsupported("hlat supports only AdamW")
    is_bf16 = build_precision_recipe(config).get("precision") == "bf16"
    note = "fp32 moments of bf16 weights; hlat stores both in the same dtype"
    is_mixed = value == "adamw_fp32OptState" and is_bf16
    return map_to({"optimizer.name": "adamw"}, note if is_mixed else "")


def _translate_weight_decay(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the weight decay, hard-coded as 0.01 for hf models (utils/model_utils.py)."""
    if not config.is_hf or value == 0.01:
        return copy_to("optimizer.weight_decay", value)
    return map_to({"optimizer.weight_decay": 0.01}, "NxDT always uses 0.01 for hf models")


def _translate_decay_norms(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the decay of norms; True exempts norms of hf models (hf_models/base_model.py)."""
    note = "in NxDT true exempts the norms of hf models, and false does not" if config.is_hf else ""
    return map_to({"optimizer.decay_norms": bool(value) is not config.is_hf}, note)


def _translate_grad_clip(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the gradient clipping norm; null disables clipping, which is 0 in hlat."""
    if value == 0:
        return mark_unsupported("0 would scale every gradient to 0; in hlat it disables clipping")
    return map_to({"optimizer.grad_clip": 0 if value is None else value})


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


def _translate_devices(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the number of processes per node to a hardware preset."""
    if value in _HARDWARE_PRESETS:
        return map_to({"hardware": _HARDWARE_PRESETS[value]})
    nearest = "trn2_48xl" if value > 64 else "trn1_32xl"
    return map_to(
        {"hardware": nearest, "hardware.processes_per_node": value},
        f"no preset has {value} devices per node; check the values of hardware={nearest}",
    )


def _translate_logical_cores(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the physical cores per logical NeuronCore, 2 on trn2."""
    if value in (None, 2 if config.get("trainer.devices") == 64 else 1):
        return mark_redundant("the hardware preset counts devices this way")
    return mark_unsupported("the hardware preset differs; check hardware.memory_gib")


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


def _translate_resume_from_checkpoint(config: NxdtConfig, value: Any) -> KeyTranslation:
    if value is None:
        return mark_redundant()
    action = "only its weights, by" if config.is_hf else "convert it to Hugging Face format, then"
    return mark_unsupported(f"{action} model.init_from; see docs/migration.md")


def _translate_save_top_k(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the number of retained checkpoints; -1 retains all."""
    if value == 0:
        return mark_unsupported("always saved; see checkpoint.every_steps")
    every = config.get("exp_manager.checkpoint_callback_params.every_n_train_steps")
    keep_last, keep_every = (1, every) if value == -1 else (value, None)
    return map_to({"checkpoint.keep_last": keep_last, "checkpoint.keep_every_steps": keep_every})


def _translate_compiler_flags(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate NEURON_CC_FLAGS with the flags that NxDT adds for the precision."""
    added = _CC_FLAGS.get(config.get("precision.type"), "")
    return map_to({"compiler.cc_flags": f"{value or ''} {added}".split()})


def _translate_fused_softmax(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate NEURON_FUSE_SOFTMAX, which is set or absent."""
    if value:
        return map_to({"++compiler.environment.NEURON_FUSE_SOFTMAX": 1})
    return map_to({"~compiler.environment.NEURON_FUSE_SOFTMAX": REMOVE_KEY})


def _translate_model_config(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the path of an hf model's config.json, whose keys are separate entries."""
    if config.has_model_config:
        return mark_redundant("read")
    return mark_unsupported("not found there or beside the YAML; it sets the values marked ???")


def _translate_precision(config: NxdtConfig, value: Any) -> KeyTranslation:
    recipe = build_precision_recipe(config)
    if not recipe:
        return mark_unsupported("unknown to NxDT")
    return map_to(recipe, PRECISION_NOTES.get(value, ""))


def _translate_manual_precision(config: NxdtConfig, value: Any) -> KeyTranslation:
    if config.get("precision.type") == "manual":
        return mark_redundant("part of precision.type=manual")
    return mark_redundant("NxDT reads it only for precision.type=manual")


def _translate_reduce_dtype(config: NxdtConfig, value: Any) -> KeyTranslation:
    """Translate the dtype of all-reduced activations."""
    compute = "fp32" if config.get("precision.type") == "fp32" else "bf16"
    mark = mark_redundant if str(value).lower() == compute else mark_unsupported
    return mark("hlat reduces activations in precision.compute")


RULES: dict[str, TranslationRule] = {
    "trainer.devices": _translate_devices,
    "trainer.lnc": _translate_logical_cores,
    "trainer.gradient_clip_val": _translate_grad_clip,
    "trainer.val_check_interval": _translate_val_check_interval,
    "trainer.limit_val_batches": _translate_limit_val_batches,
    "exp_manager.name": _copy_unless_explicit_log_dir("run.name"),
    "exp_manager.exp_dir": _copy_unless_explicit_log_dir("run.root"),
    "exp_manager.explicit_log_dir": _translate_explicit_log_dir,
    "exp_manager.resume_from_checkpoint": _translate_resume_from_checkpoint,
    "exp_manager.checkpoint_callback_params.save_top_k": _translate_save_top_k,
    "distributed_strategy.virtual_pipeline_model_parallel_size": _translate_virtual_pipeline,
    "distributed_strategy.zero1": lambda config, value: map_to(
        {"parallelism.zero": int(bool(value))}
    ),
    "distributed_strategy.sequence_parallel": _translate_sequence_parallel,
    "data.seq_length": _translate_sequence_length,
    "data.tokenizer.type": _translate_tokenizer,
    "model.model_config": _translate_model_config,
    "model.num_layers": _copy_unless_minus_one("model.num_layers"),
    "model.hidden_size": _copy_unless_minus_one("model.hidden_size"),
    "model.num_kv_heads": _translate_key_value_heads,
    "model.rope_theta": _copy_unless_minus_one("model.rope_theta"),
    # Megatron scales output projections by 1 / sqrt(2 L) (gpt_model.py)
    "model.use_scaled_init_method": lambda config, value: map_to(
        {"model.scaled_init": "depth" if value else "none"}
    ),
    "model.sliding_window_size": _translate_sliding_window,
    "model.activations_checkpoint_granularity": _translate_activation_checkpointing,
    "model.do_layer_norm_weight_decay": _translate_decay_norms,
    "model.fusions.softmax": _translate_fused_softmax,
    "model.optim.name": _translate_optimizer,
    "model.optim.betas": _translate_betas,
    "model.optim.weight_decay": _translate_weight_decay,
    "model.optim.sched.name": _translate_lr_schedule,
    "precision.type": _translate_precision,
    "precision.master_weights": _translate_manual_precision,
    "precision.fp32_grad_acc": _translate_manual_precision,
    "precision.xla_use_bf16": _translate_manual_precision,
    "precision.xla_downcast_bf16": _translate_manual_precision,
    "precision.neuron_rt_stochastic_rounding_en": _translate_manual_precision,
    "precision.parallel_layers_reduce_dtype": _translate_reduce_dtype,
    "compiler_flags": _translate_compiler_flags,
    "neuron_experimental_compress_rg": lambda config, value: map_to(
        {"++compiler.environment.NEURON_EXPERIMENTAL_COMPRESS_RG": int(value is True)}
    ),
    f"{MODEL_CONFIG_PREFIX}num_hidden_layers": _copy_unless_in_yaml("model.num_layers"),
    f"{MODEL_CONFIG_PREFIX}hidden_size": _copy_unless_in_yaml("model.hidden_size"),
    f"{MODEL_CONFIG_PREFIX}num_key_value_heads": _translate_key_value_heads,
    f"{MODEL_CONFIG_PREFIX}rope_theta": _copy_unless_in_yaml("model.rope_theta"),
    # hf models initialize every matrix with the same standard deviation (modeling_llama.py)
    f"{MODEL_CONFIG_PREFIX}initializer_range": lambda config, value: map_to(
        {"model.init_std": value, "model.scaled_init": "none"}
    ),
}
"""Rule of each key that is neither copied nor independent of the rest of the configuration."""
