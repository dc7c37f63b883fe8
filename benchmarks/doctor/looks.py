"""Measure the cost of a periodic check relative to a step, and the interval with less than 0.5 %.

Usage: PYTHONPATH=. python benchmarks/doctor/looks.py [--rounds 10]

In each round the same processes run some steps, and as many with a check after each, as with
recovery.check_replicas_every_steps=1. The difference is the cost of a check, including work that it
causes in the next step. The metric is CPU time of rank 0, because it does not depend on other load.
Writes looks.json and the table of README.md.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import describe_machine, machine, spread, table, write_between
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.recovery import periodic_checks
from tests.distributed.ranks import Ranks

HERE = Path(__file__).resolve().parent
STEPS = 2
MAX_SHARE = 0.005
BATCH = ["batch.global_batch_size=16", "batch.micro_batch_size=2", "batch.sequence_length=64"]
RUNS = {
    "one process": [],
    "two data-parallel ranks": ["parallelism.dp=2"],
    "two data-parallel ranks, mixed": ["parallelism.dp=2", "precision=mixed"],
    "two tensor-parallel ranks": ["parallelism.tp=2"],
}


def measure(config: Config, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of a step and of a check in each round on this rank."""
    engine = create_engine(config)
    engine.build(config)
    batch, times = sample_batch(config, engine), []
    seconds(engine, config, batch, checks=True)
    for _ in range(rounds):
        plain = seconds(engine, config, batch, checks=False)
        times.append((plain, seconds(engine, config, batch, checks=True) - plain))
    engine.close()
    return times


def seconds(engine: Engine, config: Config, batch: PackedSequences, checks: bool) -> float:
    """Measure the CPU time of a step, with or without a check."""
    start = time.process_time()
    for step in range(STEPS):
        engine.read_metrics(engine.train_step(batch, 1e-4))
        if checks:
            tracker: Any = None  # unused without a mismatch
            assert periodic_checks.run_periodic_checks(config, engine, tracker, step) is None
    return (time.process_time() - start) / STEPS


def sample_batch(config: Config, engine: Engine) -> PackedSequences:
    """Return the shard of a random batch of this data-parallel rank."""
    rank, dp, _ = engine.parallel_state.data_shard
    size = (config.batch.global_batch_size // dp, config.batch.sequence_length)
    generator = np.random.default_rng(rank)
    tokens = generator.integers(0, config.model.vocab_size, size, np.int32)
    return PackedSequences(tokens, np.zeros(size, np.int32))


def summarize(name: str, overrides: list[str], times: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the row of a run."""
    ratios = [check / step for step, check in times]
    return {
        "run": name,
        "overrides": [*BATCH, *overrides],
        "step_seconds": spread([step for step, _ in times]),
        "look_seconds": spread([check for _, check in times]),
        "looks_per_step": spread(ratios),
        "every_steps": math.ceil(statistics.median(ratios) / MAX_SHARE),
    }


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    lines = [
        [
            row["run"],
            f"{row['step_seconds']['median'] * 1e3:,.0f}",
            f"{row['look_seconds']['median'] * 1e3:,.0f}",
            "{median:.0%} ({min:.0%} to {max:.0%})".format(**row["looks_per_step"]),
            f"{row['every_steps']:,}",
        ]
        for row in result["rows"]
    ]
    header = [
        "run",
        "step, ms",
        "check, ms",
        "check / step",
        "interval for 0.5%, steps",
    ]
    return f"{table(header, lines)}\n\n{machine(result)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds, ranks, rows = parser.parse_args().rounds, Ranks(2), []
    for name, overrides in RUNS.items():
        config = resolve_config(compose_config([*BATCH, *overrides]))
        times = ranks.run(config.num_processes, measure, config, rounds)[0]
        rows.append(summarize(name, overrides, times))
        print(rows[-1], flush=True)
    ranks.close()
    result = {
        "rounds": rounds,
        "steps": STEPS,
        "machine": describe_machine(["torch"]),
        "rows": rows,
    }
    (HERE / "looks.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "looks", render(result))


if __name__ == "__main__":
    main()
