"""The precision recipe of a run of NxDT, which several of its keys make together."""

from typing import Any

from hlat.planning.nxdt.file import File
from hlat.planning.nxdt.outcome import Outcome, left, mapped, needless

_DOUBLES = ["norm", "softmax", "logits", "loss"]
"""Operators that NxDT computes in double, which XLA_DOWNCAST_BF16 makes fp32 on the device."""
SR_SPELLINGS = ("mixed_precisionSR", "mixed_precision_SR")


def precision(file: File, value: Any) -> Outcome:
    """The recipe of precision.type."""
    if value in SR_SPELLINGS:
        note = (
            "NxDT refuses this spelling; mixed_precision_SR is the one its launcher knows"
            if value == "mixed_precisionSR"
            else "NxDT rounds so, but its trainer knows the other spelling: no master weights there"
        )
        return mapped(recipe_of(file), note)
    if value == "autocast":
        return mapped(recipe_of(file), "fp32 are the operators that hlat lists, not autocast's")
    return mapped(recipe_of(file)) if recipe_of(file) else left("NxDT does not know it either")


def recipe_of(file: File) -> dict[str, Any]:
    """The recipe as overrides; empty where NxDT would refuse the type.

    Master weights and sums in fp32 need zero1 (model/base.py). XLA_USE_BF16 makes bf16 of every
    float and double, XLA_DOWNCAST_BF16 bf16 of floats and fp32 of doubles. With neither, hf models
    are cast to bf16 (llama_model.py) and Megatron's stay in fp32.
    """
    kind, zero = file.get("precision.type"), bool(file.get("distributed_strategy.zero1", True))
    if kind == "fp32":
        return {"precision": "fp32"}
    if kind == "bf16SR":
        return {"precision": "bf16_sr"}
    if kind in ("mixed_precision", "autocast", *SR_SPELLINGS):
        return _recipe(zero, zero, kind in SR_SPELLINGS)
    if kind != "manual":
        return {}
    stochastic = _set(file, "neuron_rt_stochastic_rounding_en")
    if _set(file, "xla_use_bf16"):
        return {"precision": "bf16_sr" if stochastic else "bf16"}
    if not file.hf and not _set(file, "xla_downcast_bf16"):
        return {"precision": "fp32"}
    return _recipe(
        zero and _set(file, "master_weights"), zero and _set(file, "fp32_grad_acc"), stochastic
    )


def manual(file: File, value: Any) -> Outcome:
    """A sub-key of precision."""
    if file.get("precision.type") == "manual":
        return needless("part of precision.type=manual")
    return needless("NxDT reads it only for precision.type=manual")


def reduced_in(file: File, value: Any) -> Outcome:
    """Sums of activations over tensor-parallel ranks."""
    own = "fp32" if file.get("precision.type") == "fp32" else "bf16"
    if str(value).lower() == own:
        return needless("hlat adds up activations in precision.compute")
    return left("hlat adds up activations in precision.compute")


def _set(file: File, key: str) -> bool:
    """Whether a flag of the precision section is on; some are texts."""
    return str(file.get(f"precision.{key}")).lower() in ("1", "true")


def _recipe(masters: bool, sums: bool, stochastic: bool) -> dict[str, Any]:
    """bf16 with operators in fp32, with or without master weights and sums in fp32."""
    if masters:
        told: dict[str, Any] = {"precision": "mixed"}
        other = {} if sums else {"accumulation": "bf16", "reduction": "bf16"}
        if stochastic:
            other["rounding"] = "stochastic"
    else:
        told = {"precision": "bf16_sr" if stochastic else "bf16"}
        other = {"accumulation": "fp32", "reduction": "fp32"} if sums else {}
        told["precision.fp32_operators"] = _DOUBLES
    return told | {f"precision.{key}": value for key, value in other.items()}
