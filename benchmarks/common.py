"""Functions of all benchmarks: summaries, machine description, tables in a README, plot style."""

import os
import platform
import re
import statistics
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import hlat

INK, MUTED, GRID = "#1c2024", "#5a6470", "#dfe3e8"
OURS, PEER = "#0072b2", "#a3adb8"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": GRID,
    "ytick.left": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hlat",
}
"""Style of figures with a row per contestant."""


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the range with four digits."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return {k: float(f"{v:.4g}") for k, v in (("median", middle), ("min", low), ("max", high))}


def describe_machine(libraries: list[str]) -> dict[str, Any]:
    """Return the processor, the load and the versions of `libraries`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load_at_end": round(os.getloadavg()[1], 2),
        "versions": {"hlat": hlat.__version__} | find_versions(libraries),
    }


def find_versions(libraries: list[str]) -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    versions = {}
    for name in libraries:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def machine(result: dict[str, Any]) -> str:
    """Format the machine of a result."""
    found = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['processor']}, {found['cores']} cores, load {found['load_at_end']} at the end, "
        f"Python {found['python']}, {versions}."
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table with the first column left and the others right aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def write_between(readme: Path, name: str, lines: str) -> None:
    """Replace the text between the two markers of a table."""
    body = f"<!-- {name} -->\n\n{lines}\n\n<!-- end -->"
    old = rf"<!-- {name} -->.*?<!-- end -->"
    readme.write_text(re.sub(old, lambda _: body, readme.read_text(), flags=re.DOTALL))
