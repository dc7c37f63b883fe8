"""What the doctor says of each planted bug, beside what a loss curve alone would have shown.

Usage: python benchmarks/doctor/run.py [--steps 200]

Every bug of tests/distributed/mutants.py is planted in a run of the quickstart's data with a
thinner model, in the layout and recipe where it can do harm; healthy runs of three seeds in each
say how far curves differ by chance. Writes result.json beside itself, and the table of README.md.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import describe_machine, machine, table, write_between
from benchmarks.doctor import curves
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.doctor.reduced_config import reduce_config
from tests.distributed import mutants
from tests.distributed.ranks import Ranks

HERE = Path(__file__).resolve().parent
SEEDS = range(3)
WINDOW, SIGMAS = 20, 4
RUN = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "batch.sequence_length=32",
    "data.workers=0",
    "schedule.total_steps=200",
]
OF_GRADIENTS = {"loss", "reduction", "pipeline", "gradient norm"}


def smoothed(losses: list[float]) -> NDArray[np.float64]:
    """Means of so many steps up to each."""
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid")


def deviation(healthy: dict[str, list[list[float]]]) -> float:
    """Of smoothed curves over seeds, in the second half of all configurations."""
    variances = [np.var([smoothed(one) for one in runs], 0, ddof=1) for runs in healthy.values()]
    half = len(variances[0]) // 2
    return float(np.sqrt(np.mean([variance[half:] for variance in variances])))


def visible_from(losses: list[float], healthy: list[list[float]], by_chance: float) -> int | None:
    """The step from which on the curve stays beyond what seeds do; None: it never does."""
    usual = np.mean([smoothed(one) for one in healthy], 0)
    inside = np.flatnonzero(np.abs(smoothed(losses) - usual) <= SIGMAS * by_chance)
    if len(inside) == 0:
        return WINDOW
    return None if inside[-1] + 1 == len(usual) else int(inside[-1]) + 1 + WINDOW


def diagnosis(ranks: Ranks, words: list[str], mutant: str, check: str) -> dict[str, Any]:
    """The doctor's words, from the one check that is to find it."""
    config = reduce_config(resolve_config(compose_config(words)))
    names = ["gradients" if check in OF_GRADIENTS else check]
    begun = time.perf_counter()
    told = ranks.run(config.num_processes, mutants.diagnose, config, mutant, names)[0]
    seconds = time.perf_counter() - begun
    (outcome,) = [one for one in told if one.check == check]
    worst = outcome.culprits[0]
    return {
        "check": check,
        "status": outcome.status.value,
        "culprit": worst.part,
        "axis": worst.axis,
        "said": outcome.said,
        "seconds": round(seconds, 2),
    }


def training(words: str, seed: int | None = None) -> Config:
    """The run in which a bug is planted."""
    seeds = [] if seed is None else [f"run.seed={seed}"]
    return resolve_config(compose_config([*RUN, *words.split(), *seeds]))


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """All bugs, after the healthy runs of their layout and recipe; what is known after each."""
    ranks = Ranks(4)

    def losses(config: Config, mutant: str | None, check: str) -> list[float]:
        restarts = check in ("data", "checkpoint")
        settings = (config, mutant, steps, restarts)
        found: list[float] = ranks.run(config.num_processes, curves.losses, *settings)[0]
        return found

    healthy: dict[str, list[list[float]]] = {}
    seen: list[tuple[dict[str, Any], list[float]]] = []
    for mutant, (words, check, _, _) in sorted(mutants.FOUND.items(), key=lambda item: item[1][0]):
        if words not in healthy:
            healthy[words] = [losses(training(words, seed), None, "") for seed in SEEDS]
        found = losses(training(words), mutant, check)
        row = {"bug": mutant, "overrides": words} | diagnosis(ranks, words.split(), mutant, check)
        seen.append((row, found))
        yield summary(seen, healthy) | {"steps": steps, "machine": describe_machine(["torch"])}
    ranks.close()


def summary(
    seen: list[tuple[dict[str, Any], list[float]]], healthy: dict[str, list[list[float]]]
) -> dict[str, Any]:
    """What the doctor said of each bug, and what its curve shows beside healthy ones."""
    by_chance, rows = deviation(healthy), []
    for row, found in seen:
        usual = healthy[row["overrides"]]
        ends = {
            "final_loss": round(float(smoothed(found)[-1]), 4),
            "healthy_loss": round(float(np.mean([smoothed(one)[-1] for one in usual])), 4),
        }
        rows.append(row | ends | {"visible_from": visible_from(found, usual, by_chance)})
    return {"seeds": len(SEEDS), "deviation": round(by_chance, 4), "rows": rows}


def render(result: dict[str, Any]) -> str:
    """The table of README.md."""
    lines = [
        [
            row["bug"],
            row["overrides"].replace("parallelism.", "") or "one process",
            f"{row['check']}: {row['culprit']} ({row['axis']})",
            f"{row['final_loss']:.3f} ({row['healthy_loss']:.3f})",
            "no" if row["visible_from"] is None else f"from step {row['visible_from']}",
        ]
        for row in result["rows"]
    ]
    header = ["bug", "run", "the doctor blames", "loss at the end (healthy)", "seen in the curve"]
    hidden = sum(row["visible_from"] is None for row in result["rows"])
    found = sum(row["status"] == "FAIL" for row in result["rows"])
    return (
        f"Of {len(lines)} bugs the doctor finds {found}; {hidden} do not show in a curve of "
        f"{result['steps']} steps. The standard deviation over seeds is "
        f"{result['deviation']:.3f}.\n\n{table(header, lines)}\n\n{machine(result)}"
    )


def main() -> None:
    """Measure, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    for result in measure(parser.parse_args().steps):
        print(result["rows"][-1], flush=True)
        (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        write_between(HERE / "README.md", "doctor", render(result))


if __name__ == "__main__":
    main()
