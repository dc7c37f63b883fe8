"""Compare the doctor's result for each planted bug with the loss curve of a run with the bug.

Usage: python benchmarks/doctor/run.py [--steps 200]

Each bug of tests/distributed/mutants.py is planted in a run of the quickstart's data with a
narrower model, in a layout and recipe that it affects. Correct runs of three seeds in each of these
give the standard deviation of the curves. Writes result.json and the table of README.md.
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
GRADIENT_CHECKS = {"loss", "reduction", "pipeline", "gradient norm", "clipping"}


def smoothed(losses: list[float]) -> NDArray[np.float64]:
    """Return the means of the last `WINDOW` losses."""
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid")


def deviation(healthy: dict[str, list[list[float]]]) -> float:
    """Return the standard deviation over seeds, in the second half of all configurations."""
    variances = [np.var([smoothed(run) for run in runs], 0, ddof=1) for runs in healthy.values()]
    half = len(variances[0]) // 2
    return float(np.sqrt(np.mean([variance[half:] for variance in variances])))


def visible_from(losses: list[float], healthy: list[list[float]], std: float) -> int | None:
    """Return the step after which the curve stays outside of `SIGMAS` deviations, or None."""
    mean = np.mean([smoothed(run) for run in healthy], 0)
    inside = np.flatnonzero(np.abs(smoothed(losses) - mean) <= SIGMAS * std)
    if len(inside) == 0:
        return WINDOW
    return None if inside[-1] + 1 == len(mean) else int(inside[-1]) + 1 + WINDOW


def diagnose(ranks: Ranks, overrides: list[str], mutant: str, check: str) -> dict[str, Any]:
    """Run the check that must detect the bug and return its result."""
    config = reduce_config(resolve_config(compose_config(overrides)))
    names = ["gradients" if check in GRADIENT_CHECKS else check]
    start = time.perf_counter()
    results = ranks.run(config.num_processes, mutants.diagnose, config, mutant, names)[0]
    seconds = time.perf_counter() - start
    (outcome,) = [result for result in results if result.check == check]
    worst = outcome.culprits[0]
    return {
        "check": check,
        "status": outcome.status.value,
        "culprit": worst.part,
        "axis": worst.axis,
        "message": outcome.message,
        "seconds": round(seconds, 2),
    }


def build_config(overrides: str, seed: int | None = None) -> Config:
    """Return the configuration of a run with a bug, or of a correct one."""
    seeds = [] if seed is None else [f"run.seed={seed}"]
    return resolve_config(compose_config([*RUN, *overrides.split(), *seeds]))


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """Measure all bugs and the correct runs, and yield the result after each bug."""
    ranks = Ranks(4)

    def losses(config: Config, mutant: str | None, check: str) -> list[float]:
        restarts = check in ("data", "checkpoint")
        settings = (config, mutant, steps, restarts)
        curve: list[float] = ranks.run(config.num_processes, curves.losses, *settings)[0]
        return curve

    healthy: dict[str, list[list[float]]] = {}
    bugs: list[tuple[dict[str, Any], list[float]]] = []
    found = sorted(mutants.FOUND.items(), key=lambda item: item[1][0])
    for mutant, (overrides, check, _, _) in found:
        if overrides not in healthy:
            healthy[overrides] = [losses(build_config(overrides, seed), None, "") for seed in SEEDS]
        curve = losses(build_config(overrides), mutant, check)
        row = {"bug": mutant, "overrides": overrides}
        row |= diagnose(ranks, overrides.split(), mutant, check)
        bugs.append((row, curve))
        yield summarize(bugs, healthy) | {"steps": steps, "machine": describe_machine(["torch"])}
    ranks.close()


def summarize(
    bugs: list[tuple[dict[str, Any], list[float]]], healthy: dict[str, list[list[float]]]
) -> dict[str, Any]:
    """Compare the curve of each bug with the correct ones of the same configuration."""
    std, rows = deviation(healthy), []
    for row, curve in bugs:
        runs = healthy[row["overrides"]]
        ends = {
            "final_loss": round(float(smoothed(curve)[-1]), 4),
            "healthy_loss": round(float(np.mean([smoothed(run)[-1] for run in runs])), 4),
        }
        rows.append(row | ends | {"visible_from": visible_from(curve, runs, std)})
    return {"seeds": len(SEEDS), "deviation": round(std, 4), "rows": rows}


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
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
    header = [
        *("bug", "run", "result of the doctor"),
        *("loss at the end (correct)", "visible in the curve"),
    ]
    hidden = sum(row["visible_from"] is None for row in result["rows"])
    found = sum(row["status"] == "FAIL" for row in result["rows"])
    return (
        f"The doctor detects {found} of {len(lines)} bugs; {hidden} are not visible in a curve of "
        f"{result['steps']} steps. The standard deviation over seeds is "
        f"{result['deviation']:.3f}.\n\n{table(header, lines)}\n\n{machine(result)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    for result in measure(parser.parse_args().steps):
        print(result["rows"][-1], flush=True)
        (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        write_between(HERE / "README.md", "doctor", render(result))


if __name__ == "__main__":
    main()
