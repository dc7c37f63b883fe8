"""Measure throughput and memory of one contestant in this process.

Usage: python benchmarks/step/measure.py '{"name": ..., "shape": ..., ...}'   (JSON)

The process builds the contestant, warms up and prints a result. Then it trains for an interval and
prints a result for each line of its standard input.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise imported by the first optimizer
import torch._inductor.compile_fx  # some peers import it now, others later
from contestants import Settings, Trainer, load_module, make_settings

from hlat.model.decoder_spec import count_parameters

WARM_UP_STEPS = 3
MIN_STEPS = 2


class CpuMemory:
    """Increase of the resident memory of this process."""

    def __init__(self) -> None:
        self.before = self._bytes("VmRSS:")

    def reset(self) -> None:
        """Reset the peak to the current memory."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the peak in bytes, without the memory before `__init__`."""
        return self._bytes("VmHWM:") - self.before

    @staticmethod
    def _bytes(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class DeviceMemory:
    """Memory of torch's allocator on an accelerator."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def synchronize(device: str) -> None:
    """Synchronize an accelerator."""
    if device != "cpu":
        torch.accelerator.synchronize()


def measure_rates(trainer: Trainer, settings: Settings, seconds: float) -> dict[str, float]:
    """Train for `seconds` and return the rates of the median step."""
    walls, cpus = [], []
    start = time.perf_counter()
    while len(walls) < MIN_STEPS or time.perf_counter() - start < seconds:
        cpu, wall = time.process_time(), time.perf_counter()
        trainer.step()
        synchronize(settings.device)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    tokens = settings.config.batch.tokens_per_step
    return {
        "tokens_per_second": tokens / statistics.median(walls),
        "tokens_per_cpu_second": tokens / statistics.median(cpus),
    }


def measure(name: str, shape: str, recipe: str, device: str, seconds: float) -> None:
    """Build the contestant, warm up, and train for an interval for each line of stdin."""
    settings = make_settings(name, shape, recipe, device)
    module = load_module(settings)
    torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
    memory = CpuMemory() if device == "cpu" else DeviceMemory()
    trainer = module.open_trainer(settings)
    expected = count_parameters(settings.config.model)
    assert trainer.num_parameters == expected, f"{trainer.num_parameters} parameters, {expected}"
    start = time.perf_counter()
    trainer.step()
    synchronize(device)
    first = {"first_step_seconds": time.perf_counter() - start}
    if (loss := trainer.loss()) is not None:
        first["first_loss"] = loss
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    synchronize(device)
    memory.reset()
    print_result(first)
    for _ in sys.stdin:
        print_result(measure_rates(trainer, settings, seconds) | {"peak_bytes": memory.peak()})


def print_result(result: dict[str, Any]) -> None:
    """Print a result for run.py."""
    print("RESULT", json.dumps(result), flush=True)


def matmul_peak(recipe: str, device: str) -> dict[str, Any]:
    """Return the FLOP/s of the fastest of several square matmuls."""
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    best = {"flops_per_second": 0.0, "flops_per_cpu_second": 0.0}
    for size in (1024, 2048, 4096) if device == "cpu" else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        for repetition in range(6):
            synchronize(device)
            cpu, wall = time.process_time(), time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            elapsed = time.perf_counter() - wall, time.process_time() - cpu
            if repetition:
                for key, value in zip(best, elapsed, strict=True):
                    best[key] = max(best[key], 2 * size**3 / max(value, 1e-9))
    return best


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["name"] == "matmul":
        print_result({})
        for _ in sys.stdin:
            print_result(matmul_peak(request["recipe"], request["device"]))
    else:
        measure(**request)
    os._exit(0)  # workers of compilers may still run


if __name__ == "__main__":
    main()
