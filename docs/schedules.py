"""Draw docs/schedules.svg from hlat.optim.lr_schedule itself.

Usage: python docs/schedules.py
"""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hlat.config.batch import BatchConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.config.run import Config
from hlat.config.schedule import ScheduleConfig
from hlat.figures.report_figure import INK, MATPLOTLIB_STYLE, SERIES
from hlat.optim.lr_schedule import compute_lr

COLOURS = [INK, SERIES[1], SERIES[0], *SERIES[2:4]]
STYLE = MATPLOTLIB_STYLE | {"svg.hashsalt": "hlat"}
WARMUP, TOTAL, FLOOR = 50, 1000, 0.1
SHAPES = [
    ScheduleConfig("constant", WARMUP, TOTAL, None),
    ScheduleConfig("wsd", WARMUP, TOTAL, FLOOR, 200),
    ScheduleConfig("hlat", WARMUP, TOTAL, FLOOR),
    ScheduleConfig("cosine", WARMUP, TOTAL, FLOOR),
    ScheduleConfig("linear", WARMUP, TOTAL, FLOOR),
]
STAGES = {
    "constant, then annealed": (
        SHAPES[0],
        [PhaseStage("base", 700), PhaseStage("anneal", lr=1, end_lr=0)],
    ),
    "cosine, warmed up again": (
        SHAPES[3],
        [
            PhaseStage("base", 550),
            PhaseStage("up", 50, lr=0.5, end_lr=0.8),
            PhaseStage("own", lr=0.8, end_lr=0),
        ],
    ),
    "hlat, held for a stage": (
        SHAPES[2],
        [PhaseStage("base", 300), PhaseStage("own", 250, lr=0.5), PhaseStage("rest")],
    ),
}


def rates(schedule: ScheduleConfig, stages: list[PhaseStage]) -> list[float]:
    """The rate of every step as a share of the peak, at one token per step."""
    config = Config(
        batch=BatchConfig(global_batch_size=1, micro_batch_size=1, sequence_length=1),
        phase=PhaseConfig("drawn", stages),
        optimizer=OptimizerConfig(lr=1.0),
        schedule=schedule,
    )
    return [compute_lr(step, config) for step in range(schedule.total_steps)]


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
        shapes = {s.name.value: rates(s, [PhaseStage("base")]) for s in SHAPES}
        plot(upper, f"Shapes: {WARMUP} steps of warm-up, a floor of {FLOOR}", shapes)
        staged = {label: rates(*told) for label, told in STAGES.items()}
        plot(lower, "Stages that set their own rate", staged)
        lower.set_xlabel("step")
        figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
