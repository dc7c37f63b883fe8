"""Write the tables of README.md from the recorded results.

Usage: python benchmarks/step/render.py     (replaces each table between its markers)
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table, write_between

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]
MATMUL, LIMIT, DEFAULT_MALLOC = "matmul", "limit", "ours, default malloc"


def format_spread(value: Json, spec: str, scale: float = 1) -> str:
    """Format a median with its range."""
    low, middle, high = (format(value[key] / scale, spec) for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def render_step(result: Json) -> str:
    """Return a table for each device, shape and recipe."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for row in result["rows"]:
        groups.setdefault((row["device"], row["shape"], row["recipe"]), []).append(row)
    parts = []
    for (device, shape, recipe), rows in groups.items():
        parts.append(f"Shape `{shape}`, recipe `{recipe}`, device `{device}`:")
        parts.append(step_table("cpu_second" if device == "cpu" else "second", rows))
    return "\n\n".join([*parts, machine(result)])


def step_table(second: str, rows: list[Json]) -> str:
    """Return the table of a group with tokens per "second" or "cpu_second"."""
    header = [
        "",
        f"tokens per {'CPU-second' if second == 'cpu_second' else 'second'}",
        "relative to transformers",
        "relative to the best peer",
        "MFU",
        "peak memory, MB",
        "first step, s",
    ]
    rendered = [step_row(second, row) for row in rows if row["contestant"] != MATMUL]
    parts = [table(header, rendered)]
    for row in rows:
        if row["contestant"] == MATMUL and "failure" not in row:
            peak = format_spread(row[f"flops_per_{second}"], ",.0f", 1e9)
            parts.append(f"Fastest matmul: {peak} GFLOP/s.")
    return "\n\n".join(parts)


def step_row(second: str, row: Json) -> list[str]:
    if "failure" in row:
        return [row["contestant"], f"failed: {row['failure']}", *[""] * 5]
    ratio, mfu = row.get(f"tokens_per_{second}_ratio"), row.get("mfu")
    best = row.get(f"tokens_per_{second}_best_peer_ratio")
    return [
        row["contestant"],
        format_spread(row[f"tokens_per_{second}"], ",.0f"),
        format_spread(ratio, ".2f") if ratio else "",
        format_spread(best, ".2f") if best else "",
        format_spread(mfu, ".0%") if mfu else "",
        *([""] * 2 if row["contestant"].startswith(LIMIT) else format_start(row)),
    ]


def format_start(row: Json) -> list[str]:
    """Return peak memory and duration of the first step."""
    return [f"{row['peak_bytes']['max'] / 1e6:,.0f}", f"{row['first_step_seconds']:.1f}"]


def render_malloc(result: Json) -> str:
    """Return the table of steps relative to those with glibc's default malloc."""
    header = [
        "shape, recipe",
        "tokens per CPU-second",
        "with the default malloc",
        "relative",
        "peak memory, MB",
    ]
    rows = {(row["contestant"], row["shape"], row["recipe"]): row for row in result["rows"]}
    key = "tokens_per_cpu_second"
    rendered = [
        [
            f"`{shape}`, {recipe}",
            format_spread(row[key], ",.0f"),
            format_spread(default[key], ",.0f"),
            format_spread(row[f"{key}_ratio"], ".2f"),
            " / ".join(f"{one['peak_bytes']['max'] / 1e6:,.0f}" for one in (row, default)),
        ]
        for (name, shape, recipe), row in rows.items()
        if name == "ours" and (default := rows.get((DEFAULT_MALLOC, shape, recipe)))
    ]
    return "\n\n".join([table(header, rendered), machine(result)])


def render_waiting(result: Json) -> str:
    """Return the table of steps by spin count and number of processes."""
    header = ["shape, spin count", "one process, tokens/s", "relative", "two, each", "relative"]
    rows = {(row["shape"], row["contestant"], row["processes"]): row for row in result["rows"]}
    rendered = []
    for shape, name in dict.fromkeys(key[:2] for key in rows):
        cells = [f"`{shape}`, {name.removeprefix('ours').removeprefix(', spinning ') or '0'}"]
        for count in (1, 2):
            row = rows[shape, name, count]
            cells += [
                format_spread(row["tokens_per_second"], ",.0f"),
                format_spread(row["ratio"], ".2f"),
            ]
        rendered.append(cells)
    return "\n\n".join([table(header, rendered), machine(result)])


def render_update(result: Json, reference: str = "ours, nearest") -> str:
    """Return a table for each number of threads."""
    groups: dict[int, list[Json]] = {}
    for row in result["rows"]:
        groups.setdefault(row["threads"], []).append(row)
    parts = []
    for threads, rows in groups.items():
        parts.append("One thread:" if threads == 1 else f"{threads} threads:")
        parts.append(update_table(rows, reference))
    return "\n\n".join([*parts, machine(result)])


def update_table(rows: list[Json], reference: str) -> str:
    """Return the table of times per weight."""
    header = ["", "ns per weight", f"relative to {reference}", "first update, s"]
    rendered = [
        [
            row["contestant"],
            format_spread(row["nanoseconds_per_parameter"], ".2f"),
            format_spread(row["ratio"], ".2f"),
            f"{row['first_step_seconds']:.1f}",
        ]
        for row in rows
    ]
    return table(header, rendered)


def render_optimizer_update(result: Json) -> str:
    """Return the table of optimizers."""
    return render_update(result, "ours, adamw")


def render_optimizer_step(result: Json) -> str:
    """Return the table of training steps relative to AdamW."""
    header = ["optimizer", "tokens per step", "relative to AdamW", "planned", "difference"]
    rows = [
        [
            row["optimizer"],
            f"{row['tokens']:,}",
            format_spread(row["measured_ratio"], ".3f"),
            f"{row['planned_ratio']:.3f}",
            f"{row['difference']:+.3f}",
        ]
        for row in result["rows"]
    ]
    protocol = result["protocol"]
    title = f"Shape `{protocol['shape']}`, recipe `{protocol['recipe']}`:"
    return "\n\n".join([title, table(header, rows), machine(result)])


def render_experts(result: Json) -> str:
    """Return the table of grouped matmuls relative to experts in turn."""
    header = ["rows per expert", "in turn, ms", "grouped, relative"]
    rows = [
        [
            f"{row['rows_per_expert']:,}",
            f"{row['in_turn_seconds'] * 1e3:.1f}",
            format_spread(row["ratio"], ".2f"),
        ]
        for row in result["rows"]
    ]
    return "\n\n".join([table(header, rows), machine(result)])


def render_attention(result: Json) -> str:
    """Return the table of attention, for each shape and recipe."""
    header = ["sequences, heads, groups, tokens, head size", "recipe", "", "CPU time, ms"]
    rows = [
        [
            ", ".join(map(str, row["shape"])),
            row["recipe"],
            row["contestant"],
            format_spread(row["seconds"], ".1f", 1e-3),
            format_spread(row["ratio"], ".2f"),
            f"{row['error']:.1e}",
        ]
        for row in result["rows"]
    ]
    return "\n\n".join(
        [table([*header, "relative to torch", "relative error"], rows), machine(result)]
    )


TABLES: dict[str, tuple[str, Callable[[Json], str]]] = {
    "step": ("result.json", render_step),
    "moe": ("moe.json", render_step),
    "malloc": ("malloc.json", render_malloc),
    "waiting": ("waiting_threads.json", render_waiting),
    "update": ("update.json", render_update),
    "optimizer update": ("optimizer_update.json", render_optimizer_update),
    "optimizer step": ("optimizer_step.json", render_optimizer_step),
    "experts": ("experts.json", render_experts),
    "attention": ("attention_blocks.json", render_attention),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=HERE, help="directory of README.md")
    folder = parser.parse_args().folder
    for name, (file, render) in TABLES.items():
        if (folder / file).exists():
            lines = render(json.loads((folder / file).read_text()))
            write_between(folder / "README.md", name, lines)


if __name__ == "__main__":
    main()
