"""Parameters without a gradient."""

import pytest
import torch
from torch import nn

from hlat.config.resolve import resolve_config
from hlat.doctor.check_result import CheckStatus
from hlat.doctor.check_runner import run_checks
from hlat.doctor.engine_harness import EngineHarness
from hlat.engine.native.gradient_accumulation import AutogradAccumulator, GradientAccumulator
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.native.step_rounding import NearestRounding
from hlat.model import attention

MESSAGE = "parameter sinks has no gradient"


@pytest.mark.parametrize("in_other_dtype", [False, True])
def test_a_parameter_without_gradient_is_named(in_other_dtype: bool) -> None:
    params = {"weight": nn.Parameter(torch.ones(2)), "sinks": nn.Parameter(torch.ones(2))}
    accumulator = (
        GradientAccumulator(params, torch.float32, NearestRounding())
        if in_other_dtype
        else AutogradAccumulator(params)
    )
    (params["weight"].sum() + params["sinks"].detach().sum()).backward()
    assert torch.equal(accumulator.get_gradient("weight"), torch.ones(2))
    with pytest.raises(RuntimeError, match=MESSAGE):
        accumulator.pop_gradients()


@pytest.mark.parametrize("recipe", ["fp32", "bf16_sr"])
def test_the_doctor_names_a_parameter_without_gradient(
    compose, small, monkeypatch, recipe: str
) -> None:
    attend = attention.attend

    def attend_without_gradient(*inputs):
        return attend(*inputs[:-1], inputs[-1].detach())

    monkeypatch.setattr(attention, "attend", attend_without_gradient)
    overrides = (*small, "model.attention.sinks=true", f"precision={recipe}", "engine.device=cpu")
    harness = EngineHarness(resolve_config(compose(*overrides)), NativeEngine())
    results = [*run_checks(harness, ["gradients"])]
    assert results[-1].status is CheckStatus.failed
    assert "parameter layers.0.self_attn.sinks has no gradient" in results[-1].message
