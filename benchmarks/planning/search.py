"""Measure the CPU time of layout searches, and compare it with another checkout of hlat.

Usage: PYTHONPATH=. python benchmarks/planning/search.py CHECKOUT

CHECKOUT is a directory with an earlier revision, such as a git worktree. Imports and composition
are not measured. Writes search.json and the table of README.md.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, spread, table, write_between

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEARCHES = {
    "llama3_8b, 1,024 nodes of H100": (
        "model=llama3_8b hardware=h100_p5 hardware.nodes=1024 batch.global_batch_size=8192"
    ),
    "llama3_70b, 16 nodes of H200": "model=llama3_70b hardware=h200_p5e hardware.nodes=16",
    "70b, 1,024 nodes of trn1": (
        "model=70b precision=mixed hardware=trn1_32xl hardware.nodes=1024 "
        "batch.global_batch_size=4096"
    ),
    "gemma3_1b, 3 nodes of A100": (
        "model=gemma3_1b hardware=a100_p4d hardware.nodes=3 batch.global_batch_size=288"
    ),
    "mixtral_8x7b, 1 node of H100": "model=mixtral_8x7b hardware=h100_p5",
}
ROUNDS = 3
_SEARCH_FLAG = "--search"


def search(overrides: list[str]) -> dict[str, float]:
    """Return the number of layouts and the CPU seconds of a search."""
    from hlat.config.compose import compose_config
    from hlat.config.resolve import convert_to_dataclasses
    from hlat.plan.layout_search import search_layouts

    config = convert_to_dataclasses(compose_config(overrides))
    start = time.process_time()
    layouts = search_layouts(config)
    return {"layouts": len(layouts), "cpu_s": time.process_time() - start}


def measure(checkout: Path, overrides: str) -> dict[str, float]:
    """Return the result of a search with the code of a checkout, in a separate process."""
    command = [sys.executable, str(Path(__file__).resolve()), _SEARCH_FLAG, *overrides.split()]
    paths = [str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    rows = []
    for row in result["rows"]:
        before, after = row["before"], row["after"]
        rows.append(
            [
                row["search"],
                f"{before['layouts']:,}",
                f"{before['cpu_s']['median']:.2f}",
                f"{after['layouts']:,}",
                f"{after['cpu_s']['median']:.2f}",
                f"{before['cpu_s']['median'] / after['cpu_s']['median']:.1f}",
            ]
        )
    header = ["search", "layouts before", "CPU s", "layouts now", "CPU s", "ratio"]
    return f"{table(header, rows)}\n\n{machine(result)}"


def main() -> None:
    if sys.argv[1] == _SEARCH_FLAG:
        print(json.dumps(search(sys.argv[2:])))
        return
    checkouts = {"before": Path(sys.argv[1]).resolve(), "after": ROOT}
    rows = []
    for name, overrides in SEARCHES.items():
        found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
        for _ in range(ROUNDS):
            for version, checkout in checkouts.items():
                found[version].append(measure(checkout, overrides))
        row: dict[str, Any] = {"search": name, "overrides": overrides}
        for version, results in found.items():
            seconds = spread([one["cpu_s"] for one in results])
            row[version] = {"layouts": results[0]["layouts"], "cpu_s": seconds}
        rows.append(row)
        print(row, flush=True)
    result = {"machine": describe_machine([]), "rows": rows}
    (HERE / "search.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "search", render(result))


if __name__ == "__main__":
    main()
