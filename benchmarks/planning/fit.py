"""Fit the planner's constants of trn1 to published rows and compute the error of each row.

Usage: PYTHONPATH=. python benchmarks/planning/fit.py

Writes fit.json and the table of published.md. Because the choice of the fitted rows affects the
error, random choices of the same number of rows are fitted as well.
"""

import json
import math
import random
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.common import table, write_between
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.plan.achieved_speed import compute_achieved_speed
from hlat.plan.hardware_efficiency import HardwareEfficiency, load_efficiencies
from hlat.plan.step_time import compute_step_time
from hlat.plan.token_cost import COMMON_OVERRIDES, PUBLISHED_RUNS, PublishedRun

HERE = Path(__file__).resolve().parent
PAGE = HERE / "published.md"
START = [0.5, 0.2, 0.3]
CHOICES = 60

Row = tuple[PublishedRun, Config]


def rate(shares: Sequence[float], config: Config) -> float:
    """Return the sequences per second with these fractions of the data sheet values."""
    compute, link, network = shares
    constants = HardwareEfficiency(compute, link, network, "fit")
    return (
        config.batch.global_batch_size
        / compute_step_time(config, compute_achieved_speed(config, constants)).total
    )


def loss(shares: Sequence[float], rows: Sequence[Row]) -> float:
    """Return the sum over rows of the mean squared log ratio of predicted and published."""
    return sum(
        math.log(rate(shares, config) / value) ** 2 / len(row.sequences_per_second)
        for row, config in rows
        for value in row.sequences_per_second
    )


def fit(rows: Sequence[Row], precision: float = 1e-3) -> list[float]:
    """Return fractions of at most 1 that minimize the loss, by coordinate descent."""
    shares, step = START, 0.3
    best = loss(shares, rows)
    while step > precision:
        before = best
        for axis in range(len(shares)):
            for factor in (1 + step, 1 / (1 + step)):
                near = [min(1, s * factor) if i == axis else s for i, s in enumerate(shares)]
                if (found := loss(near, rows)) < best:
                    shares, best = near, found
        if best == before:
            step /= 2
    return shares


def error(shares: Sequence[float], row: Row) -> float:
    """Return the relative error of the prediction to the median of a row."""
    published, config = row
    return rate(shares, config) / statistics.median(published.sequences_per_second) - 1


def other_choices(rows: Sequence[Row], count: int) -> dict[str, float]:
    """Return the largest error of held-out rows over random choices of fitted rows."""
    worst = []
    all_choices = list(combinations(range(len(rows)), count))
    for chosen in random.Random(0).sample(all_choices, CHOICES):
        shares = fit([rows[i] for i in chosen], 2e-2)
        held_out = [abs(error(shares, row)) for i, row in enumerate(rows) if i not in chosen]
        worst.append(max(held_out))
    worst.sort()
    within = sum(value < 0.15 for value in worst) / len(worst)
    return {
        "choices": len(worst),
        "median": statistics.median(worst),
        "largest": worst[-1],
        "share_within_15_percent": within,
    }


def render(result: dict[str, Any]) -> str:
    """Return the table of published.md."""
    header = [
        *("row", "nodes", "published, sequences/s", "predicted"),
        *("error, median", "error, each"),
    ]
    lines = [
        [
            f"{'' if row['fitted'] else '**held out** '}{row['name']}",
            str(row["nodes"]),
            ", ".join(f"{value:.4g}" for value in row["published"]),
            f"{row['predicted']:.4g}",
            f"{row['error']:+.1%}",
            ", ".join(f"{row['predicted'] / value - 1:+.0%}" for value in row["published"]),
        ]
        for row in result["rows"]
    ]
    return table(header, lines)


def main() -> None:
    rows = [
        (
            row,
            resolve_config(
                compose_config([*row.overrides, *COMMON_OVERRIDES, f"hardware.nodes={row.nodes}"])
            ),
        )
        for row in PUBLISHED_RUNS
    ]
    fitted = [row for row in rows if row[0].fitted]
    shares = fit(fitted)
    used = load_efficiencies()["trn1"]
    now = [used.compute, used.link, used.network]
    print("fitted", [round(share, 4) for share in shares], "in use", now)
    result = {
        "fitted": shares,
        "in_use": now,
        "rows": [
            {
                "name": row[0].name,
                "nodes": row[0].nodes,
                "fitted": row[0].fitted,
                "published": list(row[0].sequences_per_second),
                "predicted": rate(now, row[1]),
                "error": error(now, row),
            }
            for row in rows
        ],
        "other_choices": other_choices(rows, len(fitted)),
    }
    print(result["other_choices"])
    (HERE / "fit.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(PAGE, "published", render(result))


if __name__ == "__main__":
    main()
