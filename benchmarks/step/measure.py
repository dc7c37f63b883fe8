"""One contestant in one process: how fast it trains, and how much memory it takes.

Usage: python benchmarks/step/measure.py '{"name": ..., "shape": ..., ...}'   (JSON)

It builds and warms up, says so, and then trains for a moment for each line that it is sent.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer of a process imports, if nobody has
import torch._inductor.compile_fx  # which some peers import and others need later
from contestants import Settings, Trainer, load_module, make_settings

from hlat.model.decoder_spec import count_parameters

WARM_UP_STEPS = 3
LEAST_STEPS = 2


class CpuMemory:
    """Resident memory of this process, from now on."""

    def __init__(self) -> None:
        self.before = self._bytes("VmRSS:")

    def reset(self) -> None:
        """Forget the peak so far; what is kept counts on."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Bytes above what there was in the beginning."""
        return self._bytes("VmHWM:") - self.before

    @staticmethod
    def _bytes(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class DeviceMemory:
    """What torch's allocator holds on an accelerator."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def wait(device: str) -> None:
    """Let the device finish."""
    if device != "cpu":
        torch.accelerator.synchronize()


def take(trainer: Trainer, settings: Settings, seconds: float) -> dict[str, float]:
    """Times of single steps over a stretch of `seconds`."""
    walls, cpus = [], []
    start = time.perf_counter()
    while len(walls) < LEAST_STEPS or time.perf_counter() - start < seconds:
        cpu, wall = time.process_time(), time.perf_counter()
        trainer.step()
        wait(settings.device)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    tokens = settings.config.batch.tokens_per_step
    return {
        "tokens_per_second": tokens / statistics.median(walls),
        "tokens_per_cpu_second": tokens / statistics.median(cpus),
    }


def measure(name: str, shape: str, recipe: str, device: str, seconds: float) -> None:
    """Build the contestant, warm it up, and train for a while whenever it is its turn."""
    settings = make_settings(name, shape, recipe, device)
    module = load_module(settings)
    torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
    memory = CpuMemory() if device == "cpu" else DeviceMemory()
    trainer = module.open_trainer(settings)
    expected = count_parameters(settings.config.model)
    assert trainer.num_parameters == expected, f"{trainer.num_parameters} parameters, {expected}"
    start = time.perf_counter()
    trainer.step()
    wait(device)
    told = {"first_step_seconds": time.perf_counter() - start, "first_loss": trainer.loss()}
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    wait(device)
    memory.reset()
    tell(told)
    for _ in sys.stdin:
        tell(take(trainer, settings, seconds) | {"peak_bytes": memory.peak()})


def tell(result: dict[str, Any]) -> None:
    """Answer run.py."""
    print("RESULT", json.dumps(result), flush=True)


def matmul_peak(recipe: str, device: str) -> dict[str, Any]:
    """FLOP/s of the best of several square matrix products."""
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    best = {"flops_per_second": 0.0, "flops_per_cpu_second": 0.0}
    for size in (1024, 2048, 4096) if device == "cpu" else (4096, 8192, 16384):
        one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(one)
        for repetition in range(6):
            wait(device)
            cpu, wall = time.process_time(), time.perf_counter()
            torch.mm(one, other, out=out)
            wait(device)
            taken = time.perf_counter() - wall, time.process_time() - cpu
            if repetition:
                for key, value in zip(best, taken, strict=True):
                    best[key] = max(best[key], 2 * size**3 / max(value, 1e-9))
    return best


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["name"] == "matmul":
        tell({})
        for _ in sys.stdin:
            tell(matmul_peak(request["recipe"], request["device"]))
    else:
        measure(**request)
    os._exit(0)  # compilers leave workers behind


if __name__ == "__main__":
    main()
