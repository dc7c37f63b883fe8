"""Write the tables of the soak trial in README.md from soak.json.

Usage: PYTHONPATH=. python tests/faults/render_soak.py
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table, write_between

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
Row = dict[str, Any]


def seconds(found: Row | None) -> str:
    """Format median and range."""
    return "" if found is None else f"{found['median']:g} ({found['min']:g} to {found['max']:g})"


def soak(result: Row) -> str:
    """Return the tables of the faults, if recorded, and of the time of the run."""
    faults = [
        [
            name,
            *(str(found[key]) for key in ("number", "in_training")),
            *(seconds(found[key]) for key in ("detect_s", "restart_s")),
        ]
        for name, found in result.get("faults", {}).items()
    ]
    header = ["fault", "number", "while steps ran", "seconds until noticed", "until steps ran"]
    ledger = result["ledger"]
    spent = ledger["seconds"] | {"unaccounted": ledger["unaccounted_s"]}
    shares = [
        [kind, f"{value:,.2f} s", f"{100 * value / ledger['wall_s']:.2f} %"]
        for kind, value in spent.items()
    ]
    tables = [table(header, faults)] if faults else []
    return "\n\n".join([*tables, table(["time", "seconds", "share"], shares)])


def foreseen(result: Row) -> str:
    """Return the table of measured and predicted goodput."""
    ledger, plan = result["ledger"], result["prediction"]
    measured = ledger["goodput_with_data_wait"]
    rows = [
        ["measured", f"{100 * measured:.1f} %", f"{100 * ledger['uptime']:.1f} %"],
        ["formula", f"{100 * plan['formula']['training']:.1f} %", ""],
        ["simulation, mean", f"{100 * plan['simulation']['mean']['training']:.1f} %", ""],
        [
            "simulation, 90% of runs",
            f"{100 * plan['simulation']['percentile_5']['training']:.1f} to "
            f"{100 * plan['simulation']['percentile_95']['training']:.1f} %",
            "",
        ],
    ]
    command = f"    python {plan['command']}"
    return "\n\n".join([table(["", "goodput", "uptime of the ledger"], rows), command])


def main() -> None:
    result = json.loads((HERE / "soak.json").read_text())
    for writer in (soak, foreseen):
        write_between(README, writer.__name__, f"{writer(result)}\n\n{machine(result)}")


if __name__ == "__main__":
    main()
