"""Measure one contestant of the step benchmark on a device.

Usage: python benchmarks/gpu/contestant.py '{"name": ..., "shape": ..., "recipe": ...}'   (JSON)

The process imports its libraries and waits for a line on its standard input before it uses the
device. So the next contestant can be imported while another one is measured.
"""

import json
import os
import sys
import time
import zlib
from functools import cache
from typing import Any

import numpy as np
import plain_loop
from contestants import Settings, Trainer, load_module, make_settings
from measure import WARM_UP_STEPS, CpuMemory, DeviceMemory, matmul_peak, print_result, synchronize
from numpy.typing import NDArray

from benchmarks.common import spread
from hlat.config.compose import compose_config
from hlat.config.model import ModelConfig
from hlat.config.resolve import resolve_config
from hlat.engine import state_shards
from hlat.model.decoder_spec import (
    compute_flops_per_token,
    compute_init_std,
    count_parameters,
)
from hlat.model.parameter_spec import Initialization, ParameterSpec
from hlat.plan.memory_estimate import estimate_memory

NUM_INTERVALS = 3
PATTERN_SIZE = (1 << 20) + 7
"""Number of values that are repeated; not a divisor of any matrix width."""


def repeat_normals(
    parameter: ParameterSpec,
    model: ModelConfig,
    seed: int,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
) -> NDArray[np.float32]:
    """Return initial values of whole tensors that repeat a million normals.

    Sampling 3 billion values would take longer than the benchmark. All contestants have the same
    values, and their standard deviation is the configured one.
    """
    if parameter.init is not Initialization.normal:
        return np.full(shape, parameter.init is Initialization.ones, np.float32)
    assert not any(offset), f"{parameter.name} is sharded"
    pattern = build_pattern(compute_init_std(parameter, model), seed)
    return np.resize(np.roll(pattern, zlib.crc32(parameter.name.encode())), shape)


@cache
def build_pattern(std: float, seed: int) -> NDArray[np.float32]:
    """Return normals of a standard deviation."""
    values = np.random.default_rng(seed).standard_normal(PATTERN_SIZE, np.float32)
    return values * np.float32(std)


def measure_rate(trainer: Trainer, settings: Settings, seconds: float) -> float:
    """Return tokens per second over an interval of steps with one synchronization at its end."""
    start = time.perf_counter()
    trainer.step()
    synchronize(settings.device)
    num_steps = max(2, round(seconds / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(num_steps):
        trainer.step()
    synchronize(settings.device)
    return num_steps * settings.config.batch.tokens_per_step / (time.perf_counter() - start)


def plan_bytes(settings: Settings) -> int:
    """Return the memory that hlat plans for this step on a GPU."""
    overrides = [*settings.overrides, "hardware=h200"]
    return round(estimate_memory(resolve_config(compose_config(overrides))).total)


def measure(settings: Settings, seconds: float, module: Any) -> dict[str, Any]:
    """Build the contestant, warm up, and measure `NUM_INTERVALS` intervals."""
    start = time.perf_counter()
    memory = CpuMemory() if settings.device == "cpu" else DeviceMemory()
    trainer = module.open_trainer(settings)
    synchronize(settings.device)
    built = time.perf_counter()
    expected = count_parameters(settings.config.model)
    assert trainer.num_parameters == expected, f"{trainer.num_parameters} parameters, {expected}"
    trainer.step()
    synchronize(settings.device)
    first_step = time.perf_counter()
    first_loss = trainer.loss()
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    synchronize(settings.device)
    memory.reset()
    rates = [measure_rate(trainer, settings, seconds) for _ in range(NUM_INTERVALS)]
    result = {
        "tokens_per_second": spread(rates),
        "flops_per_token": compute_flops_per_token(
            settings.config.model, settings.config.batch.sequence_length
        ),
        "peak_bytes": memory.peak(),
        "first_loss": first_loss,
        "build_seconds": round(built - start, 2),
        "first_step_seconds": round(first_step - built, 2),
    }
    if settings.module == "ours":
        result["planned_bytes"] = plan_bytes(settings)
    return result


def main() -> None:
    request = json.loads(sys.argv[1])
    name, seconds = request.pop("name"), request.pop("seconds")
    if name == "matmul":
        sys.stdin.readline()
        print_result(matmul_peak(request["recipe"], request["device"]))
        os._exit(0)
    settings = make_settings(name, **request)
    module = load_module(settings)
    settings.config  # noqa: B018  composed before the device is used
    state_shards.compute_initial_values = repeat_normals
    plain_loop.compute_initial_values = repeat_normals
    sys.stdin.readline()
    print_result(measure(settings, seconds, module))
    os._exit(0)  # workers of compilers may still run


if __name__ == "__main__":
    main()
