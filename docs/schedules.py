"""Draw docs/schedules.svg from hlat.schedule itself.

Usage: python docs/schedules.py
"""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hlat.config.batch import Batch
from hlat.config.optimizer import Optimizer
from hlat.config.phase import Phase, Stage
from hlat.config.run import Config
from hlat.config.schedule import Schedule, Shape
from hlat.schedule import rate_at

INK, MUTED, GRID = "#1c2024", "#5a6470", "#dfe3e8"
COLOURS = ["#1c2024", "#c04f00", "#0072b2", "#007a5a", "#9b4a85"]
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hlat",
}
WARMUP, TOTAL, FLOOR = 50, 1000, 0.1
SHAPES = [
    Schedule(Shape.constant, WARMUP, TOTAL, None),
    Schedule(Shape.wsd, WARMUP, TOTAL, FLOOR, 200),
    Schedule(Shape.hlat, WARMUP, TOTAL, FLOOR),
    Schedule(Shape.cosine, WARMUP, TOTAL, FLOOR),
    Schedule(Shape.linear, WARMUP, TOTAL, FLOOR),
]
STAGES = {
    "constant, then annealed": (
        SHAPES[0],
        [Stage("base", 700), Stage("anneal", lr=1, end_lr=0)],
    ),
    "cosine, warmed up again": (
        SHAPES[3],
        [Stage("base", 550), Stage("up", 50, lr=0.5, end_lr=0.8), Stage("own", lr=0.8, end_lr=0)],
    ),
    "hlat, held for a stage": (
        SHAPES[2],
        [Stage("base", 300), Stage("own", 250, lr=0.5), Stage("rest")],
    ),
}


def rates(schedule: Schedule, stages: list[Stage]) -> list[float]:
    """The rate of every step as a share of the peak, at one token per step."""
    config = Config(
        batch=Batch(global_batch_size=1, micro_batch_size=1, sequence_length=1),
        phase=Phase("drawn", stages),
        optimizer=Optimizer(lr=1.0),
        schedule=schedule,
    )
    return [rate_at(step, config) for step in range(schedule.total_steps)]


def plot(axes: Axes, title: str, curves: dict[str, list[float]]) -> None:
    """Draw the curves of a panel."""
    for colour, (label, values) in zip(COLOURS, curves.items(), strict=False):
        axes.plot(values, color=colour, label=label, linewidth=1.6)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel("share of the peak")
    axes.set_ylim(0, 1.05)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def main() -> None:
    """Write the figure beside this file."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 5.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        shapes = {s.name.value: rates(s, [Stage("base")]) for s in SHAPES}
        plot(upper, f"Shapes: {WARMUP} steps of warm-up, a floor of {FLOOR}", shapes)
        staged = {label: rates(*told) for label, told in STAGES.items()}
        plot(lower, "Stages that set their own rate", staged)
        lower.set_xlabel("step")
        figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
