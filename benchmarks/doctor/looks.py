"""What a look between steps costs of a step, and how often it takes less than 0.5 % of the time.

Usage: PYTHONPATH=. python benchmarks/doctor/looks.py [--rounds 10]

In each round the same processes make some steps, and as many with a look after each, as
recovery.check_replicas_every_steps=1 would; the difference is the cost of a look, with what it
makes the next step do again. CPU time of the first rank is counted, which other programs do not
stretch. Writes looks.json beside itself, and the table of README.md.
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
SHARE = 0.005
BATCH = ["batch.global_batch_size=16", "batch.micro_batch_size=2", "batch.sequence_length=64"]
RUNS = {
    "one process": [],
    "two data-parallel ranks": ["parallelism.dp=2"],
    "two data-parallel ranks, mixed": ["parallelism.dp=2", "precision=mixed"],
    "two tensor-parallel ranks": ["parallelism.tp=2"],
}


def measure(config: Config, rounds: int) -> list[tuple[float, float]]:
    """Of each round, seconds of a step and of a look; on one rank."""
    engine = create_engine(config)
    engine.build(config)
    batch, found = tokens(config, engine), []
    seconds(engine, config, batch, looks=True)
    for _ in range(rounds):
        plain = seconds(engine, config, batch, looks=False)
        found.append((plain, seconds(engine, config, batch, looks=True) - plain))
    engine.close()
    return found


def seconds(engine: Engine, config: Config, batch: PackedSequences, looks: bool) -> float:
    """CPU time of a step, or of a step and a look."""
    begin = time.process_time()
    for step in range(STEPS):
        engine.read(engine.train_step(batch, 1e-4))
        if looks:
            assert (
                periodic_checks.run_periodic_checks(config, engine, tracker=None, step=step) is None
            )  # type: ignore[arg-type]
    return (time.process_time() - begin) / STEPS


def tokens(config: Config, engine: Engine) -> PackedSequences:
    """A data-parallel rank's part of a batch."""
    size = (config.batch.global_batch_size // engine.world.dp_size, config.batch.sequence_length)
    lot = np.random.default_rng(engine.world.dp_rank)
    drawn = lot.integers(0, config.model.vocab_size, size, np.int32)
    return PackedSequences(drawn, np.zeros(size, np.int32))


def row(name: str, words: list[str], found: list[tuple[float, float]]) -> dict[str, Any]:
    """What rounds have shown of a run."""
    share = [look / step for step, look in found]
    return {
        "run": name,
        "overrides": [*BATCH, *words],
        "step_seconds": spread([step for step, _ in found]),
        "look_seconds": spread([look for _, look in found]),
        "looks_per_step": spread(share),
        "every_steps": math.ceil(statistics.median(share) / SHARE),
    }


def render(result: dict[str, Any]) -> str:
    """The table of README.md."""
    lines = [
        [
            one["run"],
            f"{one['step_seconds']['median'] * 1e3:,.0f}",
            f"{one['look_seconds']['median'] * 1e3:,.0f}",
            "{median:.0%} ({min:.0%} to {max:.0%})".format(**one["looks_per_step"]),
            f"{one['every_steps']:,}",
        ]
        for one in result["rows"]
    ]
    header = [
        "run",
        "step, ms",
        "look, ms",
        "look of a step",
        "0.5 % is a look every so many steps",
    ]
    return f"{table(header, lines)}\n\n{machine(result)}"


def main() -> None:
    """Measure, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds, ranks, rows = parser.parse_args().rounds, Ranks(2), []
    for name, words in RUNS.items():
        config = resolve_config(compose_config([*BATCH, *words]))
        rows.append(row(name, words, ranks.run(config.num_processes, measure, config, rounds)[0]))
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
