"""Bytes per weight of the recipes of the HLAT paper."""

from hlat.config.precision import Dtype, PrecisionConfig, RoundingMode
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.precision.precision_bytes import (
    BytesPerParameter,
    compute_bytes_per_parameter,
    compute_update_bytes,
    get_itemsize,
)

FP32, BF16 = Dtype.fp32, Dtype.bf16
ADAMW = AdamWSpec()
BF16_SR = PrecisionConfig("bf16_sr", *[BF16] * 6, rounding=RoundingMode.stochastic)
MIXED = PrecisionConfig("mixed", BF16, BF16, BF16, FP32, FP32, FP32, master_weight_dtype=FP32)


def test_bytes_of_every_dtype() -> None:
    assert {dtype.value: get_itemsize(dtype) for dtype in Dtype} == {"fp32": 4, "bf16": 2}


def test_fp32_is_16() -> None:
    assert compute_bytes_per_parameter(PrecisionConfig("fp32", *[FP32] * 6), ADAMW).total == 16


def test_hlat_7b_is_8() -> None:
    found = compute_bytes_per_parameter(BF16_SR, ADAMW)
    assert found == BytesPerParameter(2, 2, 0, 0, 4)
    assert found.total == 8


def test_hlat_70b_is_2_and_4_and_12_sharded() -> None:
    found = compute_bytes_per_parameter(MIXED, ADAMW)
    assert (found.weights, found.gradients, found.optimizer) == (2, 4, 12)
    assert found.transient_gradients == 2


def test_hlat_70b_static_memory_per_core() -> None:
    """facts: (2 + 4 + 2 + 12 / 32) / 256 of 68.98e9 parameters are about 2.3 GB."""
    found = compute_bytes_per_parameter(MIXED, ADAMW)
    held = found.weights + found.gradients + found.transient_gradients + found.optimizer / 32
    assert round(held / 256 * 68.976648192, 1) == 2.3


def test_bf16_with_master_weights() -> None:
    precision = PrecisionConfig("bf16_sr_master", *[BF16] * 5, FP32, master_weight_dtype=FP32)
    assert compute_bytes_per_parameter(precision, ADAMW) == BytesPerParameter(2, 2, 0, 4, 8)


def test_bytes_of_an_update_include_the_copy_of_master_weights() -> None:
    role = ParameterRole.matrix
    assert compute_update_bytes(BF16_SR, ADAMW, role) == 2 + 2 * (2 + 4)
    assert compute_update_bytes(MIXED, ADAMW, role) == 4 + 2 * (4 + 8) + 2
