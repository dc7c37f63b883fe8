"""Precision recipe of an NxDT run, which several of its keys define together."""

from typing import Any

from hlat.plan.nxdt.nxdt_config import NxdtConfig

_FP32_OPERATORS = ["norm", "softmax", "logits", "loss"]
"""Operators that NxDT computes in double, which XLA_DOWNCAST_BF16 makes fp32 on the device."""
STOCHASTIC_ROUNDING_TYPES = ("mixed_precisionSR", "mixed_precision_SR")
PRECISION_NOTES = {
    "mixed_precisionSR": "NxDT refuses this spelling; its launcher requires mixed_precision_SR",
    "mixed_precision_SR": (
        "NxDT rounds stochastically, but its trainer expects the other spelling: no master weights "
        "there"
    ),
    "autocast": "fp32 for the operators that hlat lists instead of those of autocast",
}


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
    if precision in ("mixed_precision", "autocast", *STOCHASTIC_ROUNDING_TYPES):
        return _build_bf16_recipe(zero1, zero1, precision in STOCHASTIC_ROUNDING_TYPES)
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
        other = {} if fp32_accumulation else {"accumulation": "bf16", "reduction": "bf16"}
        if stochastic:
            other["rounding"] = "stochastic"
    else:
        recipe = {
            "precision": "bf16_sr" if stochastic else "bf16",
            "precision.fp32_operators": _FP32_OPERATORS,
        }
        other = {"accumulation": "fp32", "reduction": "fp32"} if fp32_accumulation else {}
    return recipe | {f"precision.{key}": value for key, value in other.items()}
