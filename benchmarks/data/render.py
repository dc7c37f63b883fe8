"""Write the tables of README.md from the recorded results.

Usage: python benchmarks/data/render.py     (replaces each table between its markers)
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table, write_between

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]


def thousands(value: Json) -> str:
    """Format a rate and its range in thousands."""
    low, middle, high = (f"{value[key] / 1000:,.0f}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def seconds(value: Json) -> str:
    """Format a time and its range."""
    return f"{value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})"


def fraction(row: Json, encoder: str) -> str:
    """Format the rate relative to that of an encoder."""
    value = row.get(f"fraction_of_{encoder}_encoder")
    return "" if value is None else f"{value:.2f}"


def throughput_row(row: Json) -> list[str]:
    if "failure" in row:
        return [row["contestant"], f"failed: {row['failure']}", *[""] * 6]
    return [
        row["contestant"],
        thousands(row["tokens_per_cpu_second"]),
        fraction(row, "reference"),
        fraction(row, "fast"),
        thousands(row["tokens_per_wall_second"]),
        seconds(row["first_batch_seconds"]),
        f"{row['first_ever_batch_seconds']:.1f}",
        f"{row['peak_rss_bytes']['median'] / 1e9:.2f}",
    ]


def render_throughput(result: Json) -> str:
    """Return a table for each corpus, tokenizer and number of workers."""
    header = [
        "",
        "thousand tokens per CPU-second",
        "relative to the reference encoder",
        "relative to the fast encoder",
        "thousand tokens per second",
        "first batch, s",
        "with empty caches, s",
        "peak memory, GB",
    ]
    groups: dict[tuple[str, str, int], list[Json]] = {}
    for row in result["rows"]:
        groups.setdefault((row["corpus"], row["tokenizer"], row["workers"]), []).append(row)
    parts = []
    for (corpus, tokenizer, workers), rows in groups.items():
        title = f"Corpus `{corpus}`, tokenizer `{tokenizer}`, {workers or 'no'} workers:"
        parts += [title, table(header, [throughput_row(row) for row in rows])]
    return "\n\n".join([*parts, machine(result)])


def render_resume(result: Json) -> str:
    """Return the table of restart times, and of lost and repeated documents."""
    full = max((row["points"] for row in result["rows"] if "points" in row), key=len)
    points = [(point["corpus"], point["documents"]) for point in full]
    header = ["", "fresh start, s", *[f"after {n:,} of `{name}`" for name, n in points]]
    header += ["lost / repeated without restarts", "with restarts"]
    rows = [resume_row(row, points) for row in result["rows"]]
    return table(header, rows) + "\n\n" + machine(result)


def resume_row(row: Json, points: list[tuple[str, int]]) -> list[str]:
    """Return the row of a contestant; points that were not measured are empty."""
    if "failure" in row:
        return [row["contestant"], f"failed: {row['failure']}", *[""] * (len(points) + 2)]
    cells = {
        (point["corpus"], point["documents"]): f"{point['seconds']['median']:.2f} s, "
        f"{point['state_bytes'] / 1000:,.1f} kB, {'equal' if point['exact'] else '**different**'}"
        for point in row["points"]
    }
    losses = [f"{loss['never']:,} / {loss['again']:,}" for loss in row["losses"]]
    losses[1] += f" ({row['losses'][1]['restarts']} restarts)"
    restarts = [cells.get(point, "") for point in points]
    return [row["contestant"], f"{row['fresh_seconds']['median']:.2f}", *restarts, *losses]


def render_scale(result: Json) -> str:
    """Return the table of our loader at large sizes."""
    rows = []
    for encoder in ("reference", "fast"):
        study = result[encoder]
        for entry in study["rows"]:
            failed = f"failed: {entry.get('failure')}"
            value = failed if "failure" in entry else seconds(entry["seconds"])
            rows.append([f"{encoder} encoder: first batch of {entry['rows']:,} rows, s", value])
        samples = study["memory"]
        if "failure" not in samples:
            first, last = samples[0], samples[-1]
            documents = f"{first['documents']:,} and {last['documents']:,}"
            value = f"{first['own_bytes'] / 1e6:,.0f} and {last['own_bytes'] / 1e6:,.0f}"
            rows.append(
                [f"{encoder} encoder: private memory after {documents} documents, MB", value]
            )
        rows += [waiting_row(encoder, entry) for entry in study["waiting"]]
    rows += [permutation_row(entry) for entry in result["permutation"]]
    return table(["", ""], rows) + "\n\n" + machine(result)


def waiting_row(encoder: str, entry: Json) -> list[str]:
    """Return the row of a consumer with a fixed rate."""
    if "failure" in entry:
        return [f"{encoder} encoder: waiting", f"failed: {entry['failure']}"]
    pace = f"{entry['tokens_per_second'] / 1000:,.0f} thousand tokens per second"
    title = f"{encoder} encoder, {entry['workers']} workers: share waited at {pace}"
    return [title, f"{entry['share_waited']:.2%}"]


def permutation_row(entry: Json) -> list[str]:
    """Return the row of a permutation."""
    one, block = entry["microseconds"], entry["block_microseconds"]
    return [
        f"order of {entry['size']:,}: µs per document, single and in blocks",
        f"{one:.1f}, {block:.3f}",
    ]


def render_share(result: Json) -> str:
    """Return the table of our loader relative to its encoder, with the machine of each label."""
    header = ["", "encoder alone, ns per token", "loader, ns per token", "ratio", "quartiles"]
    rows = []
    for pair in zip(*(measured["rows"] for measured in result.values()), strict=True):
        for label, row in zip(result, pair, strict=True):
            title = f"{row['encoder']} encoder, `{row['tokenizer']}`, `{row['corpus']}`, {label}"
            costs = [row[f"{name}_ns_per_token"]["median"] for name in ("encoder", "loader")]
            low, high = row["quartiles"]
            cells = [f"{cost:,.0f}" for cost in costs]
            rows.append([title, *cells, seconds(row["ratio"]), f"{low:.2f} to {high:.2f}"])
    notes = [
        f"{label.capitalize()}: {measured['rounds']} rounds, {machine(measured)}"
        for label, measured in result.items()
    ]
    return "\n\n".join([table(header, rows), *notes])


TABLES: dict[str, tuple[str, Callable[[Json], str]]] = {
    "throughput": ("result.json", render_throughput),
    "resume": ("resume.json", render_resume),
    "scale": ("scale.json", render_scale),
    "share": ("encoder_share.json", render_share),
}


def main() -> None:
    for name, (file, render) in TABLES.items():
        if (HERE / file).exists():
            lines = render(json.loads((HERE / file).read_text()))
            write_between(HERE / "README.md", name, lines)


if __name__ == "__main__":
    main()
