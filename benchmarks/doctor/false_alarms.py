"""Count false alarms of the doctor in correct runs of each model family.

Usage: python benchmarks/doctor/false_alarms.py [--seeds 20] [--layouts 5] [--models NAME ...]

All checks run for each tiny preset, layout and seed. Writes false_alarms.json and the table of
README.md. Exits with 1 after a false alarm.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.config.compose import compose_config
from hlat.config.package_dirs import list_choices
from hlat.config.resolve import resolve_config
from hlat.doctor.check_result import CheckResult, CheckStatus
from hlat.doctor.check_runner import CHECKS
from hlat.doctor.reduced_config import reduce_config
from tests.distributed import mutants
from tests.distributed.layout_overrides import KV, PP, SP
from tests.distributed.ranks import Ranks

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    "one process": "",
    "one process, mixed": "precision=mixed",
    "tp=4": KV,
    "tp=2 with sequence parallelism, bf16_sr": f"{SP} precision=bf16_sr",
    "pp=2": PP,
}
CHECK_NAMES = [name for name in CHECKS if name != "data"]


def check(ranks: Ranks, model: str, layout: str, seed: int) -> tuple[list[CheckResult], float]:
    """Run all checks of one configuration; return the results and the seconds."""
    overrides = [f"model={model}", f"run.seed={seed}", *layout.split()]
    config = reduce_config(resolve_config(compose_config(overrides)))
    start = time.perf_counter()
    results = ranks.run(config.num_processes, mutants.diagnose, config, None, CHECK_NAMES)[0]
    return results, time.perf_counter() - start


def summarize(
    model: str, layout: str, runs: list[tuple[list[CheckResult], float]]
) -> dict[str, Any]:
    """Return the alarms of all seeds, and the largest ratio of measured value and tolerance."""
    results = [result for run, _ in runs for result in run]
    failed = [result for result in results if result.status is CheckStatus.failed]
    ratios = {
        f"{result.check}: {values['largest'] / values['tolerance']:.2f}": values["largest"]
        / values["tolerance"]
        for result in results
        if (values := result.numbers).keys() >= {"largest", "tolerance"}
    }
    return {
        "model": model,
        "layout": layout,
        "seeds": len(runs),
        "checks": sum(result.status is not CheckStatus.not_applicable for result in results),
        "alarms": [f"{result.check}: {result.message}" for result in failed],
        "nearest": max(ratios, key=ratios.__getitem__),
        "seconds": round(sum(seconds for _, seconds in runs) / len(runs), 1),
    }


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    keys = ("model", "layout", "seeds", "checks", "alarms", "nearest", "seconds")
    lines = [
        [str(len(row[key]) if key == "alarms" else row[key]) for key in keys]
        for row in result["rows"]
    ]
    header = [
        *("model", "layout", "seeds", "checks", "false alarms"),
        *("largest value over tolerance", "seconds per run"),
    ]
    alarms = sum(len(row["alarms"]) for row in result["rows"])
    runs = sum(row["seeds"] for row in result["rows"])
    return (
        f"{runs} correct runs give {alarms} false alarms.\n\n{table(header, lines)}\n\n"
        f"{machine(result)}"
    )


def main() -> None:
    presets = [name for name in list_choices("model") if name.endswith("_tiny")]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS))
    parser.add_argument("--models", nargs="+", default=presets)
    settings = parser.parse_args()
    ranks, rows = Ranks(4), []
    for name, layout in [*LAYOUTS.items()][: settings.layouts]:
        for model in settings.models:
            runs = [check(ranks, model, layout, seed) for seed in range(settings.seeds)]
            rows.append(summarize(model, name, runs))
            print(rows[-1], flush=True)
    ranks.close()
    result = {"rows": rows, "machine": describe_machine(["torch"])}
    (HERE / "false_alarms.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "false-alarms", render(result))
    sys.exit(any(row["alarms"] for row in rows))


if __name__ == "__main__":
    main()
