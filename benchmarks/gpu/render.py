"""Write page.md and figure.svg from result.json.

Usage: python benchmarks/gpu/render.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.common import OURS, PEER, STYLE, machine, table

Json = dict[str, Any]
MATMUL = "matmul"
NOT_MEASURED = "This part has not been measured."


def render(result: Json) -> str:
    """Return the page in Markdown."""
    sections = {
        "Environment": ("environment", render_environment),
        "Tests": ("tests", render_tests),
        "Step": ("step", lambda part: render_step(part, find_peak(result))),
        "Profile": ("profile", render_profile),
        "Attention": ("attention", render_attention),
        "Loader": ("loader", lambda part: render_loader(part, result)),
    }
    parts = [f"# Results on `{result['device']}`"]
    for title, (name, render_part) in sections.items():
        part = result.get(name)
        parts.append(f"## {title}")
        if part is None:
            parts.append(NOT_MEASURED)
            continue
        if "failure" in part:
            parts.append(f"Failed:\n\n```\n{part['failure'].strip()}\n```")
        body = render_part(part)
        parts += [body] if body else []
        parts.append(f"Time of this part: {part.get('part_seconds', 0):.0f} s.")
    return "\n\n".join(parts) + "\n"


def find_peak(result: Json) -> float | None:
    """Return the peak of the data sheet in FLOP/s, if the device is known."""
    return result.get("environment", {}).get("device", {}).get("peak_flops")


def render_environment(part: Json) -> str:
    """Return versions and device."""
    if "versions" not in part:
        return ""
    lines = [machine({"machine": part})]
    device = part.get("device")
    if device:
        lines.append(
            f"{device['name']}, {device['memory_bytes'] / 2**30:.1f} GiB, CUDA {device['cuda']}, "
            f"cuDNN {device['cudnn']}, capability {device['capability']}."
        )
        lines.append("```\n" + "\n".join(device["nvidia_smi"]) + "\n```")
    burn_in = part["burn_in"]
    lines.append(
        f"{burn_in['matmuls']} matmuls with {burn_in['wrong_elements']} wrong elements, "
        f"{burn_in['flops_per_second'] / 1e12:,.1f} TFLOP/s."
    )
    return "\n\n".join(lines)


def render_tests(part: Json) -> str:
    """Return counts and failures."""
    if "counts" not in part:
        return ""
    counts = ", ".join(f"{count} {name.lower()}" for name, count in part["counts"].items())
    rows = [[name, part["messages"].get(name, "").replace("|", "\\|")] for name in part["failed"]]
    lines = [f"{counts}."]
    if rows:
        lines.append(table(["failed", "message"], rows))
    lines += [f"* skipped {reason}" for reason in part["skipped"]]
    return "\n\n".join(lines)


def render_step(part: Json, peak: float | None) -> str:
    """Return a table for each shape and recipe."""
    rows = part.get("rows", [])
    matmul = find_matmul(rows)
    groups: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        if row["contestant"] != MATMUL:
            groups.setdefault((row["shape"], row["recipe"]), []).append(row)
    header = ["", "tokens/s", "MFU, data sheet", "of the best matmul", "peak memory, GB", "planned"]
    header += ["first step, s", "loss"]
    lines = []
    for (shape, recipe), group in groups.items():
        lines.append(f"Shape `{shape}`, recipe `{recipe}`:")
        lines.append(table(header, [render_row(row, peak, matmul) for row in group]))
    if matmul:
        lines.append(f"Best matmul: {matmul / 1e12:,.1f} TFLOP/s.")
    if lines:
        lines.append("![MFU by shape and recipe](figure.svg)")
    return "\n\n".join(lines)


def find_matmul(rows: list[Json]) -> float | None:
    """Return the FLOP/s of the best matmul, if it was measured."""
    found = [row["flops_per_second"] for row in rows if "flops_per_second" in row]
    return found[0] if found else None


def render_row(row: Json, peak: float | None, matmul: float | None) -> list[str]:
    """Return the cells of one contestant."""
    if "failure" in row:
        return [row["contestant"], row["failure"].replace("|", "\\|")[:120], *[""] * 6]
    rate = row["tokens_per_second"]
    planned = row.get("planned_bytes")
    same = {True: "same", False: f"differs by {row.get('loss_difference', 0):.1e}", None: ""}
    return [
        row["contestant"],
        f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
        *(f"{compute_mfu(row, flops):.1%}" if flops else "" for flops in (peak, matmul)),
        f"{row['peak_bytes'] / 1e9:.2f}",
        f"{planned / 1e9:.2f}" if planned else "",
        f"{row['first_step_seconds']:.1f}",
        same[row.get("same_loss")],
    ]


def compute_mfu(row: Json, flops_per_second: float) -> float:
    """Return the model FLOPs utilization."""
    rate: float = row["tokens_per_second"]["median"]
    return rate * row["flops_per_token"] / flops_per_second


def render_profile(part: Json) -> str:
    """Return the kernels of each profiled step."""
    lines = []
    for row in part.get("profiles", []):
        title = f"{row['contestant']}, shape `{row['shape']}`, recipe `{row['recipe']}`"
        if "failure" in row:
            lines.append(f"{title}: {row['failure']}")
            continue
        shares = ", ".join(f"{name} {share:.1%}" for name, share in row["shares"].items())
        lines.append(
            f"{title}: step {row['step_seconds'] * 1e3:,.1f} ms, kernels "
            f"{row['kernel_seconds'] * 1e3:,.1f} ms in {row['num_launches']} launches, "
            f"{row['idle_share']:.1%} of the step outside of kernels. {shares}."
        )
        kernels = [
            [
                kernel["name"][:90].replace("|", "\\|"),
                kernel["category"],
                str(kernel["calls"]),
                f"{kernel['microseconds'] / 1e3:.2f}",
                f"{kernel['share']:.1%}",
            ]
            for kernel in row["kernels"]
        ]
        lines.append(table(["kernel", "category", "calls", "ms", "share"], kernels))
    return "\n\n".join(lines)


def render_attention(part: Json) -> str:
    """Return time and speed of the kernels; those with documents have fewer operations."""
    rows = [
        [
            row["shape"],
            row["kernel"],
            "yes" if row["deterministic"] else "no",
            f"{row['seconds'] * 1e3:.2f}" if "seconds" in row else row["failure"][:90],
            f"{row['causal_flops_per_second'] / 1e12:,.1f}" if "seconds" in row else "",
        ]
        for row in part.get("rows", [])
    ]
    header = ["shape", "kernel", "deterministic", "ms", "TFLOP/s of causal attention"]
    return table(header, rows) if rows else ""


def render_loader(part: Json, result: Json) -> str:
    """Return the speed of the loader relative to the fastest step of the same shape."""
    if "tokens_per_second" not in part:
        return ""
    rates = [
        row["tokens_per_second"]["median"]
        for row in result.get("step", {}).get("rows", [])
        if row["shape"] == part["shape"] and isinstance(row.get("tokens_per_second"), dict)
    ]
    text = f"{part['tokens_per_second']:,} tokens/s with {part['workers']} workers"
    if not rates:
        return f"{text}."
    ratio = part["tokens_per_second"] / max(rates)
    return f"{text}: {ratio:.1f} times what the fastest step of shape `{part['shape']}` consumes."


def draw_mfu(result: Json) -> Figure:
    """Return bars of the MFU, or of the share of the best matmul on an unknown device."""
    rows = result.get("step", {}).get("rows", [])
    peak = find_peak(result) or find_matmul(rows)
    measured = [row for row in rows if "flops_per_token" in row] if peak else []
    figure = Figure(figsize=(8, 1 + 0.3 * len(measured)), layout="constrained")
    axes = figure.subplots()
    values = [compute_mfu(row, peak or 1.0) for row in measured]
    colors = [OURS if row["contestant"].startswith("ours") else PEER for row in measured]
    axes.barh(range(len(measured)), values, color=colors)
    labels = [f"{row['shape']}, {row['recipe']}: {row['contestant']}" for row in measured]
    axes.set_yticks(range(len(measured)), labels)
    axes.invert_yaxis()
    for index, value in enumerate(values):
        axes.annotate(
            f"{value:.1%}", (value, index), (4, 0), textcoords="offset points", va="center"
        )
    known = find_peak(result) is not None
    axes.set_xlabel(
        "MFU of the data sheet's peak" if known else "share of the best matmul's FLOP/s"
    )
    return figure


def main() -> None:
    folder = Path(sys.argv[1])
    result = json.loads((folder / "result.json").read_text())
    (folder / "page.md").write_text(render(result))
    with rc_context(STYLE):
        draw_mfu(result).savefig(folder / "figure.svg", metadata={"Date": None})
    print("RESULT", json.dumps({"page": str(folder / "page.md")}))


if __name__ == "__main__":
    main()
