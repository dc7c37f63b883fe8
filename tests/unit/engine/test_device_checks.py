"""Device checks have exact expected values and detect one wrong element in millions."""

import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.config.precision import Dtype
from hlat.engine import device_checks
from hlat.precision.torch_dtypes import TORCH_DTYPES

CPU = torch.device("cpu")
COMPILE_S = 0.2


@pytest.mark.parametrize("size", [64, 256])
def test_expected_result_equals_the_integer_matmul(size: int) -> None:
    a, b, expected = (array.astype(np.int64) for array in device_checks.build_matmul_problem(size))
    assert (a @ b == expected).all()
    assert len(np.unique(expected)) > 30


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
@pytest.mark.parametrize("size", [256, pytest.param(4096, marks=pytest.mark.slow)])
def test_matrices_are_exact_in_every_dtype(size: int, dtype: torch.dtype) -> None:
    for array in device_checks.build_matmul_problem(size):
        exact = torch.from_numpy(array)
        assert torch.equal(exact.to(dtype).float(), exact)


@pytest.mark.parametrize("recipe", [Dtype.fp32, Dtype.bf16])
def test_burn_in_of_a_correct_device(recipe: Dtype) -> None:
    count, num_wrong, flops_per_s = device_checks.run_burn_in(CPU, TORCH_DTYPES[recipe])
    assert num_wrong == 0
    assert count > 1
    assert flops_per_s > 1e6


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("bad_call", [1, 5])
def test_one_wrong_element_is_detected(monkeypatch, bad_call, value) -> None:
    calls = []

    def matmul(a, b):
        calls.append(0)
        result = a @ b
        if len(calls) == bad_call:
            result[100, 37] = result[100, 37] + 1 if value is None else value
        return result

    monkeypatch.setattr(device_checks, "_matmul", matmul)
    assert device_checks.run_burn_in(CPU, torch.bfloat16)[1] == 1


@pytest.mark.parametrize("compiled_calls", [{1, 2}, {1, 2, 11}])
def test_compilation_is_not_timed(compiled_calls: set[int]) -> None:
    """Compile at the first execution, as a lazy device, or later in the background."""
    calls = []

    def execute() -> None:
        calls.append(0)
        if len(calls) in compiled_calls:
            time.sleep(COMPILE_S)

    count, num_wrong, flops_per_s = device_checks.run_burn_in(CPU, torch.float32, execute)
    assert (count, num_wrong) == (len(calls), 0)
    assert flops_per_s > 8 * 2 * 256**3 / COMPILE_S, "eight matmuls are faster than a compilation"


@pytest.mark.slow
def test_compilation_of_each_operator_is_not_timed() -> None:
    """TorchNeuron compiles an operator when it is called first with these shapes."""

    class SleepingCompiler(TorchDispatchMode):
        compiled: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            key = f"{function} {[getattr(arg, 'shape', None) for arg in args]}"
            if key not in self.compiled:
                self.compiled.add(key)
                time.sleep(COMPILE_S)
            return function(*args, **kwargs or {})

    with SleepingCompiler():
        flops_per_s = device_checks.run_burn_in(CPU, torch.float32)[2]
    assert len(SleepingCompiler.compiled) > 3
    assert flops_per_s > 8 * 2 * 256**3 / COMPILE_S


def test_a_device_that_compares_incorrectly_is_detected(monkeypatch) -> None:
    class Blind(torch.Tensor):
        def __ne__(self, other):
            return torch.zeros(self.shape, dtype=torch.bool)

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    monkeypatch.setattr(device_checks, "_matmul", lambda a, b: (a @ b + 1).as_subclass(Blind))
    assert device_checks.run_burn_in(CPU, torch.float32)[1] == 256 * 256


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_ring_pairs(size: int) -> None:
    ring = device_checks._build_ring_pairs(size)
    assert len({tuple(pair) for pair in ring}) == len(ring) == (1 if size == 2 else size)
    counts = [sum(rank in pair for pair in ring) for rank in range(size)]
    assert counts == [1 if size == 2 else 2] * size


class StochasticCasts(TorchDispatchMode):
    """Device that rounds casts of values near one to bf16 stochastically."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (kwargs or {}).get("dtype") is torch.bfloat16:
            noisy = args[0] + torch.rand(args[0].shape) * 2**-7
            args = ((noisy * 2**7).floor() / 2**7,)
        return function(*args, **kwargs or {})


def test_the_rounding_mode_is_measured(monkeypatch) -> None:
    context = device_checks.DeviceContext(CPU, torch.float32, {})
    assert device_checks.measure_rounded_up_share(context) is None
    monkeypatch.setattr(device_checks, "STOCHASTIC_ROUNDING_DEVICES", {"cpu"})
    assert device_checks.measure_rounded_up_share(context) == 0
    with StochasticCasts():
        share = device_checks.measure_rounded_up_share(context)
    assert share == pytest.approx(1 / 8, abs=0.02)
