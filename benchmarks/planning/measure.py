"""What one rank of a layout really holds at most, in a process of its own.

Usage: python benchmarks/planning/measure.py OVERRIDE ...   (of hlat.train; RANK and so on are set)

Prints the bytes by which the process grew from before the model was built to its peak over two
steps. Small tensors come from a heap that never shrinks, so the caller sets MALLOC_MMAP_THRESHOLD_.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine

STEPS = 2


def resident(key: str) -> int:
    """Bytes of VmRSS, now, or VmHWM, at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(overrides: list[str]) -> None:
    config = resolve_config(compose_config(overrides))
    engine = NativeEngine()
    engine.run_device_checks(config)  # joins the others, and lets libraries make what they keep
    torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    engine.build(config)
    batch = config.batch
    shape = (batch.global_batch_size // engine.world.dp_size, batch.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    for _ in range(STEPS):
        engine.read(engine.train_step(PackedSequences(tokens), 1e-4))
    print(json.dumps(resident("VmHWM") - before), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
