"""Measure the time of each kernel in one step of hlat.

Usage: python benchmarks/gpu/profile_step.py '{"name": ..., "shape": ..., "recipe": ...}'   (JSON)
"""

import json
import os
import re
import sys
import time
from typing import Any

from contestant import repeat_normals
from contestants import load_module, make_settings
from measure import WARM_UP_STEPS, print_result, synchronize
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hlat.engine import state_shards

MIN_TIME_FRACTION = 0.02
"""Kernels below this share of the device time are not listed."""
CATEGORIES = {
    "attention": r"flash|fmha|sdpa|attention|flex",
    "matmul": r"gemm|nvjet|cutlass|cublas|::mm|addmm|matmul|linear",
    "optimizer": r"adam|multi_tensor",
    "norm": r"rms_norm|layer_norm|rmsnorm",
    "compiled": r"^triton_",
    "copy": r"memcpy|memset|copy",
}
"""Patterns of kernel names; the first match counts, and the others are `other`."""
ANNOTATIONS = r"^(ProfilerStep|Optimizer\.|autograd::|Torch-Compiled|## Call)"
"""Ranges that contain kernels and must not be counted with them."""


def categorize(name: str) -> str:
    """Return the category of a kernel."""
    matches = (
        key for key, pattern in CATEGORIES.items() if re.search(pattern, name, re.IGNORECASE)
    )
    return next(matches, "other")


def list_kernels(profiled: profile, device: str) -> list[dict[str, Any]]:
    """Return name, calls and microseconds of kernels, or of operators on a CPU."""
    on_cpu = device == "cpu"
    kernels = []
    for event in profiled.key_averages():
        is_annotation = getattr(event, "is_user_annotation", False) or re.search(
            ANNOTATIONS, event.key
        )
        if is_annotation or (event.device_type == DeviceType.CPU) != on_cpu:
            continue
        microseconds = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        kernels.append({"name": event.key, "calls": event.count, "microseconds": microseconds})
    return sorted(kernels, key=lambda kernel: -kernel["microseconds"])


def summarize(kernels: list[dict[str, Any]], step_seconds: float) -> dict[str, Any]:
    """Return the fractions of the kernel time, and the fraction of the step outside of kernels."""
    total = sum(kernel["microseconds"] for kernel in kernels)
    shares: dict[str, float] = {}
    for kernel in kernels:
        kernel["share"] = round(kernel["microseconds"] / total, 4)
        category = kernel["category"] = categorize(kernel["name"])
        shares[category] = shares.get(category, 0.0) + kernel["microseconds"] / total
    return {
        "step_seconds": round(step_seconds, 5),
        "kernel_seconds": round(total / 1e6, 5),
        "idle_share": round(max(0.0, 1 - total / 1e6 / step_seconds), 4),
        "num_launches": sum(kernel["calls"] for kernel in kernels),
        "shares": {key: round(share, 4) for key, share in sorted(shares.items())},
        "kernels": [kernel for kernel in kernels if kernel["share"] >= MIN_TIME_FRACTION],
    }


def main() -> None:
    settings = make_settings(**json.loads(sys.argv[1]))
    state_shards.compute_initial_values = repeat_normals
    trainer = load_module(settings).open_trainer(settings)
    for _ in range(1 + WARM_UP_STEPS):
        trainer.step()
    synchronize(settings.device)
    start = time.perf_counter()
    trainer.step()
    synchronize(settings.device)
    step_seconds = time.perf_counter() - start
    activities = [ProfilerActivity.CPU]
    if settings.device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        trainer.step()
        synchronize(settings.device)
    print_result(summarize(list_kernels(profiled, settings.device), step_seconds))
    os._exit(0)  # workers of compilers may still run


if __name__ == "__main__":
    main()
