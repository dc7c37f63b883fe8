"""FLOPs in specifications against the operations of update rules, and incomplete specifications."""

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.config import components
from hlat.model.parameter_spec import ParameterRole
from hlat.optim import ademamix, lion, schedule_free
from hlat.optim.adamw import compute_adamw_update
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.ademamix_spec import AdEMAMixSpec
from hlat.optim.lion_spec import LionSpec
from hlat.optim.optimizer_spec import OptimizerSpec, StateTensor
from hlat.optim.schedule_free_spec import ScheduleFreeSpec
from tests.conftest import REPOSITORY

NUMEL = 1000
FLOPS_PER_ELEMENT = {torch.ops.aten.lerp.Scalar: 3, torch.ops.aten.lerp.Tensor: 3}
"""FLOPs of operators that are not one operation."""


class CountFlops(TorchDispatchMode):
    """Count the element-wise FLOPs of a parameter; those of scalars are omitted."""

    flops: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        result: Tensor = func(*args, **(kwargs or {}))
        if result.numel() == NUMEL:
            self.flops += FLOPS_PER_ELEMENT.get(func, 1)
        return result


def count_flops(compute_update: Callable[..., list[Tensor]], spec: OptimizerSpec) -> int:
    """Count the FLOPs of an update per element of a matrix."""
    group = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "warmup_steps": 10}
    group |= {"alpha": 8.0, "beta3": 0.999}
    num_values = 2 + len(spec.list_state_tensors(ParameterRole.matrix))
    values = [torch.ones(NUMEL) for _ in range(num_values)]
    with CountFlops() as counter:
        compute_update(values, torch.ones(()), torch.full((), 1e-3), group)
    return counter.flops


def test_adamw_has_the_flops_of_its_update_rule() -> None:
    spec = AdamWSpec()
    assert spec.get_update_flops(ParameterRole.matrix) == count_flops(compute_adamw_update, spec)


def test_lion_has_the_flops_of_its_update_rule() -> None:
    spec = LionSpec()
    assert spec.get_update_flops(ParameterRole.matrix) == count_flops(lion.compute_update, spec)


def test_ademamix_has_the_flops_of_its_update_rule() -> None:
    spec = AdEMAMixSpec()
    assert spec.get_update_flops(ParameterRole.matrix) == count_flops(ademamix.compute_update, spec)


def test_schedule_free_has_the_flops_of_its_update_rule() -> None:
    spec = ScheduleFreeSpec()
    flops = count_flops(schedule_free.compute_update, spec)
    assert spec.get_update_flops(ParameterRole.matrix) == flops


def test_an_extension_has_the_flops_of_its_update_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_components", dict(components._components))
    extension = runpy.run_path(str(REPOSITORY / "examples/cautious_adamw.py"))
    spec: OptimizerSpec = extension["CautiousAdamWSpec"]()
    flops = count_flops(extension["compute_update"], spec)
    assert spec.get_update_flops(ParameterRole.matrix) == flops


def test_a_specification_without_flops_is_rejected() -> None:
    class Incomplete(OptimizerSpec):
        def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
            return ()

        def get_gradient_source(self, settings: Any, role: ParameterRole) -> tuple[str, float]:
            return "exp_avg", 1.0

    with pytest.raises(TypeError, match="get_update_flops"):
        Incomplete()  # type: ignore[abstract]
