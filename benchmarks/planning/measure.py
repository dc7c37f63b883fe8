"""Measure the peak memory of one rank of a layout in this process.

Usage: python benchmarks/planning/measure.py [--equal-experts] OVERRIDE ...

The overrides are those of hlat.train, with RANK etc. set. With `--equal-experts` routers select the
experts in turn, so that all have the same number of rows.

Prints the increase in bytes from before the model is built to the peak of two steps, without the
libraries, which are imported before. The caller sets MALLOC_MMAP_THRESHOLD_, because small tensors
are on a heap that does not shrink.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.moe import Router

STEPS = 2
EQUAL_EXPERTS = "--equal-experts"


def resident(key: str) -> int:
    """Return VmRSS, the current memory, or VmHWM, the peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def select_in_turn() -> None:
    """Replace the experts that routers select."""
    forward = Router.forward

    def select(router: Router, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
        weights, experts = forward(router, x_BSH)
        numbers = torch.arange(experts.numel()) % router.settings.num_experts
        return weights, numbers.view_as(experts)

    Router.forward = select  # type: ignore[method-assign]


def main(overrides: list[str]) -> None:
    if EQUAL_EXPERTS in overrides:
        overrides.remove(EQUAL_EXPERTS)
        select_in_turn()
    config = resolve_config(compose_config(overrides))
    engine = NativeEngine()
    engine.run_device_checks(config)  # starts the process group and initializes libraries
    torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    engine.build(config)
    batch = config.batch
    shape = (batch.global_batch_size // engine.parallel_state.dp_size, batch.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    for _ in range(STEPS):
        engine.read_metrics(engine.train_step(PackedSequences(tokens), 1e-4))
    print(json.dumps(resident("VmHWM") - before), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
