"""Compare planned layouts with published ones, and the losses of runs of sweeps/parallelism.yaml.

Usage: PYTHONPATH=. python benchmarks/sweeps/layouts.py --runs runs/sweeps/parallelism
       (writes parallelism.json, parallelism.md and parallelism_1.svg; without --runs, the losses
       are those of the JSON)
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.common import INK, STYLE, table
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.plan.achieved_speed import get_efficiency
from hlat.plan.layout_search import LayoutCandidate, search_layouts
from hlat.study.run_comparison import list_run_dirs
from hlat.study.run_record import load_run_record

HERE = Path(__file__).resolve().parent
PLANNING = HERE.parent / "planning"
NAME = "parallelism"
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Model and machine of a plan, and the published layout of the model."""

    name: str
    overrides: tuple[str, ...]
    tp: int
    pp: int
    rows: tuple[str, ...]
    """Names of rows of fit.json, or numbers of rows of throughput.json, with this layout."""


CASES = (
    Case(
        "7B, 4 nodes of trn1",
        ("model=7b", "hardware=trn1_32xl", "hardware.nodes=4"),
        *(8, 1, ("HLAT-7B, TP8 DP16", "HLAT-7B, TP8 DP128", "HLAT-7B, TP8 DP256")),
    ),
    Case(
        "70B, 32 nodes of trn1",
        ("model=70b", "hardware=trn1_32xl", "hardware.nodes=32"),
        *(32, 8, ("Llama-2-70B, TP32 PP8 DP4", "Llama-2-70B, TP32 PP4 DP8")),
    ),
    Case(
        "Llama 3.1 8B, 64 H100",
        ("model=llama3_8b", "hardware=h100_hgx", "hardware.nodes=8", "batch.sequence_length=8192"),
        *(1, 1, ("R001", "R004")),
    ),
    Case(
        "Llama 3.1 70B, 64 H100",
        ("model=llama3_70b", "hardware=h100_hgx", "hardware.nodes=8", "batch.sequence_length=8192"),
        *(4, 4, ("R011", "R016")),
    ),
)


def plan_case(case: Case) -> Json:
    """Return the fastest layout of each tp, pp and ZeRO stage, and the published rows."""
    config = resolve_config(compose_config(list(case.overrides)))
    fastest: dict[tuple[int, int, int], LayoutCandidate] = {}
    for layout in search_layouts(config):
        chosen = layout.config.parallelism
        if layout.fits:
            fastest.setdefault((chosen.tp, chosen.pp, chosen.zero), layout)
    low, high = get_efficiency(config).layout_interval
    return {
        "name": case.name,
        "published_layout": [case.tp, case.pp],
        "interval": [low, high],
        "layouts": [build_layout_row(layout) for layout in fastest.values()],
        "published": [*load_rows(case, config)],
    }


def build_layout_row(layout: LayoutCandidate) -> Json:
    """Return the degrees, the batch and the planned throughput of a layout."""
    config, chosen = layout.config, layout.config.parallelism
    assert layout.step_s is not None
    tokens = config.batch.global_batch_size * config.batch.sequence_length
    return {
        "tp": chosen.tp,
        "pp": chosen.pp,
        "stages_per_rank": chosen.stages_per_rank,
        "zero": chosen.zero,
        "recompute": chosen.activation_checkpointing.value,
        "micro_batch": config.micro_batch_size,
        "tokens_per_s_per_device": round(tokens / layout.step_s / config.num_processes, 1),
    }


def load_rows(case: Case, config: Config) -> list[Json]:
    """Return the published rows of a case with their planned throughput, per device."""
    trn1 = {row["name"]: row for row in json.loads((PLANNING / "fit.json").read_text())["rows"]}
    gpus = json.loads((PLANNING / "throughput.json").read_text())["rows"]
    by_number = {row["id"]: row for row in gpus}
    rows = []
    for name in case.rows:
        if name in trn1:
            row = trn1[name]
            factor = config.batch.sequence_length / row["nodes"] / config.num_processes
            factor *= config.hardware.nodes
            published = statistics.median(row["published"]) * factor
            rows.append(_build_row(name, published, row["predicted"] * factor))
        else:
            row = by_number[name]
            label = f"{row['model']}, {row['devices']} {row['device']}, {row['layout']}"
            rows.append(_build_row(f"{label} ({name})", row["published"], row["planned"]))
    return rows


def _build_row(name: str, published: float, planned: float) -> Json:
    return {"name": name, "published": round(published, 1), "planned": round(planned, 1)}


def load_losses(sweep: Path) -> dict[str, list[float]]:
    """Return the losses of all steps of each finished run by its layout."""
    losses = {}
    for run in list_run_dirs([sweep]):
        record = load_run_record(run)
        if record.last_attempt_events[-1]["event"] == "finish":
            layout = record.valid_config.parallelism
            values = [float(row["loss"]) for row in record.metrics if "loss" in row]
            losses[f"tp {layout.tp}, pp {layout.pp}"] = values
    return losses


def plot_cases(cases: Sequence[Json]) -> Figure:
    """Plot the throughput over tp and pp relative to the fastest layout of each case."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    for axes, case in zip(figure.subplots(2, 2).flat, cases, strict=True):
        _plot_case(axes, case)
    return figure


def _plot_case(axes: Axes, case: Json) -> None:
    layouts = case["layouts"]
    tps = sorted({layout["tp"] for layout in layouts})
    pps = sorted({layout["pp"] for layout in layouts})
    best = max(layout["tokens_per_s_per_device"] for layout in layouts)
    shares = np.full((len(tps), len(pps)), np.nan)
    for layout in layouts:
        cell = tps.index(layout["tp"]), pps.index(layout["pp"])
        shares[cell] = np.fmax(shares[cell], layout["tokens_per_s_per_device"] / best)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.2, origin="lower", aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        label = "-" if np.isnan(share) else f"{share:.0%}"
        color = "white" if share > 0.85 else INK
        axes.text(column, row, label, ha="center", va="center", color=color, fontsize=8)
    tp, pp = case["published_layout"]
    if tp in tps and pp in pps:
        corner = pps.index(pp) - 0.47, tps.index(tp) - 0.46
        axes.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, edgecolor="#c04f00", linewidth=2))
    axes.set(
        title=f"{case['name']}\n100% = {best:,.0f} tokens/s per device", xlabel="pp", ylabel="tp"
    )
    axes.set_xticks(range(len(pps)), pps)
    axes.set_yticks(range(len(tps)), tps)
    axes.grid(visible=False)


def render_case(case: Json) -> str:
    """Return the tables of a case: fastest layouts, ZeRO stages, published rows."""
    layouts, published = case["layouts"], case["published_layout"]
    key = "tokens_per_s_per_device"
    layouts = sorted(layouts, key=lambda layout: -layout[key])
    same = [layout for layout in layouts if [layout["tp"], layout["pp"]] == published]
    chosen = [*layouts[:3], *(layout for layout in same if layout not in layouts[:3])]
    header = [
        *("layout", "stages per rank", "ZeRO", "recomputation", "micro batch"),
        *("tokens/s per device", "relative"),
    ]
    rows = [
        [
            f"tp {one['tp']}, pp {one['pp']}" + (" (published)" if one in same else ""),
            *(str(one[name]) for name in ("stages_per_rank", "zero", "recompute", "micro_batch")),
            *(f"{one[key]:,.0f}", f"{one[key] / layouts[0][key]:.0%}"),
        ]
        for one in chosen
    ]
    published_rows = [
        [
            row["name"],
            *(f"{row['published']:,.0f}", f"{row['planned']:,.0f}"),
            f"{row['planned'] / row['published'] - 1:+.0%}",
        ]
        for row in case["published"]
    ]
    titles = ["published row", "published, tokens/s per device", "planned", "error"]
    return "\n\n".join([f"### {case['name']}", table(header, rows), table(titles, published_rows)])


def compare_losses(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest relative difference to the losses of one process by layout."""
    reference = np.array(losses["tp 1, pp 1"])
    return {
        layout: float(np.abs(np.array(values) / reference - 1).max())
        for layout, values in losses.items()
    }


def find_verdict(case: Json) -> str:
    """Return the comparison of the published layout with the fastest planned one."""
    key, (tp, pp) = "tokens_per_s_per_device", case["published_layout"]
    best = max(case["layouts"], key=lambda layout: layout[key])
    same = [one[key] for one in case["layouts"] if (one["tp"], one["pp"]) == (tp, pp)]
    fastest = f"tp {best['tp']}, pp {best['pp']}, ZeRO {best['zero']}"
    if not same:
        return f"{case['name']}: {fastest} is the fastest; the published layout does not fit."
    share, (low, high) = max(same) / best[key], case["interval"]
    equal = "within" if share >= low / high else "outside"
    return (
        f"{case['name']}: {fastest} is the fastest. The published layout, tp {tp}, pp {pp}, has "
        f"{share:.0%} of its throughput, {equal} the error of the plan."
    )


def render(result: Json) -> str:
    """Return the page."""
    differences = compare_losses(result["losses"])
    largest = max(differences.values())
    rows = [[layout, f"{value:.1e}"] for layout, value in differences.items()]
    num_steps = len(next(iter(result["losses"].values())))
    paragraphs = [
        f"# {NAME}: Which layout has the highest throughput?",
        f"Design: [{NAME}.yaml](../../sweeps/{NAME}.yaml). Written by `layouts.py`.",
        "**Predicted**, not measured: the throughput of each layout, by the planner.",
        "\n".join(f"* {find_verdict(case)}" for case in result["cases"]),
        "**Measured**: the losses. One machine without several devices cannot compare the "
        f"throughput of layouts. In {len(rows)} layouts of up to eight processes, the losses of "
        f"{num_steps} steps of the tiny model differ from those of one process by at most "
        f"{largest:.1e}, relative.",
        f"![Planned throughput over tp and pp]({NAME}_1.svg)",
        "Planned throughput of the fastest layout by tp and pp, relative to the fastest of all; "
        "-: none fits in memory. Orange: the published layout.",
        "## Planned and published",
        "The layouts are those of hlat's engines, without context parallelism. Rows of NeMo use "
        "it, and their plans do.",
        *(render_case(case) for case in result["cases"]),
        "## Losses",
        table(["layout", "largest relative difference"], rows),
    ]
    return "\n\n".join(paragraphs) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, help="directory of the sweep; default: the losses of the JSON"
    )
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    recorded = arguments.output / f"{NAME}.json"
    if arguments.runs is None:
        losses = json.loads(recorded.read_text())["losses"]
    else:
        losses = load_losses(arguments.runs)
    result = {"cases": [plan_case(case) for case in CASES], "losses": losses}
    recorded.write_text(json.dumps(result) + "\n")
    recorded.with_suffix(".md").write_text(render(result))
    with rc_context(STYLE):
        figure = plot_cases(result["cases"])
        figure.savefig(recorded.with_name(f"{NAME}_1.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
