"""Measure training steps of hlat's engine with an optimizer, relative to AdamW and to the plan.

Usage: python benchmarks/step/optimizer_step.py [--optimizer muon] [--tokens 2048 32768]

Both engines run in one process and alternate in each round, so that other load affects both. Ratios
of times are computed within a round. The planned ratio is that of the FLOPs of forward pass,
backward pass and matmuls of the update, as `hlat plan` counts them. All matmuls have one dtype, as
the ratio assumes one speed: iterations of Muon are fp32 with the recipe fp32. The metric is wall
time.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from contestants import make_settings

from benchmarks.common import describe_machine, spread
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan.pipeline_stage_shards import build_stage_shards
from hlat.plan.update_cost import compute_matrix_update_flops

HERE = Path(__file__).resolve().parent
REFERENCE = "adamw_small"
RATE = 1e-5
ITERATIVE = ("muon", "normuon")
"""Optimizers with a dtype of iterations."""
DTYPES = {"fp32": "fp32", "bf16": "bf16", "mixed": "bf16"}
"""dtype of matmuls by recipe."""
LIMIT = 0.1
"""Largest part of the time with AdamW by which a step may exceed the planned ratio."""


class Contestant:
    """hlat's engine with an optimizer and a fixed batch."""

    def __init__(self, arguments: argparse.Namespace, optimizer: str, num_tokens: int) -> None:
        overrides = make_settings("ours", arguments.shape, arguments.recipe, "cpu").overrides
        length = resolve_config(compose_config(overrides)).batch.sequence_length
        batch = f"batch.global_batch_size={num_tokens // length}"
        overrides += [f"optimizer={optimizer}", batch]
        if optimizer in ITERATIVE:
            overrides.append(f"optimizer.{optimizer}.iteration_dtype={DTYPES[arguments.recipe]}")
        config = resolve_config(compose_config(overrides))
        self.engine = NativeEngine()
        self.engine.build(config)
        self.engine.init_weights()
        size = (config.batch.global_batch_size, length)
        generator = np.random.default_rng(config.run.seed)
        tokens = generator.integers(0, config.model.vocab_size, size, np.int32)
        self._sequences = PackedSequences(tokens)
        self.flops = count_flops(config)

    def measure(self, num_steps: int) -> float:
        """Return the mean seconds of a step."""
        start = time.perf_counter()
        for _ in range(num_steps):
            metrics = self.engine.train_step(self._sequences, RATE)
        self.engine.read_metrics(metrics)
        return (time.perf_counter() - start) / num_steps


def count_flops(config: Config) -> float:
    """Return the planned FLOPs of a step on one process."""
    mesh = ParallelDegrees(dp=1, tp=1, pp=1)
    (stage,) = build_stage_shards(config.model, mesh)
    per_token = compute_flops_per_token(config.model, config.batch.sequence_length)
    update = compute_matrix_update_flops(config, mesh, stage)
    return per_token * config.batch.tokens_per_step + update


def measure(arguments: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """Return the row of a number of tokens per step."""
    names = (REFERENCE, arguments.optimizer)
    reference, other = (Contestant(arguments, name, num_tokens) for name in names)
    for contestant in (reference, other):
        contestant.measure(1)
    rounds = [
        [contestant.measure(arguments.steps) for contestant in (reference, other)]
        for _ in range(arguments.rounds)
    ]
    planned = other.flops / reference.flops
    measured = spread([two / one for one, two in rounds])
    difference = measured["median"] - planned
    print(
        f"{num_tokens:,} tokens: {arguments.optimizer} takes {measured['median']:.3f} times as "
        f"long as AdamW, planned {planned:.3f}, difference {difference:+.3f} "
        f"({'within' if difference <= LIMIT else 'beyond'} the limit of {LIMIT:g})"
    )
    return {
        "optimizer": arguments.optimizer,
        "tokens": num_tokens,
        "adamw_seconds": spread([one for one, _ in rounds]),
        "seconds": spread([two for _, two in rounds]),
        "measured_ratio": measured,
        "planned_ratio": round(planned, 4),
        "difference": round(difference, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", default="muon", help="choice of conf/optimizer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--shape", default="small", help="tiny, small, or a preset of conf/model")
    parser.add_argument("--recipe", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of an interval")
    parser.add_argument("--output", type=Path, default=HERE / "optimizer_step.json")
    arguments = parser.parse_args()
    result = {
        "rows": [measure(arguments, num_tokens) for num_tokens in arguments.tokens],
        "machine": describe_machine(["torch"]),
        "protocol": {
            key: getattr(arguments, key) for key in ("shape", "recipe", "rounds", "steps")
        },
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
