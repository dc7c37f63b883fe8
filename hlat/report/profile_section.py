"""Recorded steps of a run: their time by class of work, and their files (docs/profiling.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hlat.engine.step_account import TIME_CLASSES
from hlat.figures.report_figure import FIGURE_SIZE, INK, MUTED, PAPER, SERIES, ReportFigure
from hlat.study.run_record import RunRecord
from hlat.tracking.row_validation import is_finite_number
from hlat.tracking.text_format import format_decimal, format_duration, format_percent

FIGURE_NAME = "profile"
"""File name without extension."""
MAX_PROFILES = 12
"""Maximum number of recorded steps in the figure and the table; the last ones are shown."""
_FILE_ENDINGS = (".json.gz", "_operators.csv", "_modules.csv", "_account.json")
"""Ends of the names of the files of each recorded step."""
_MIN_LABELLED_SHARE = 0.08
_STYLES: dict[str, tuple[str, str | None]] = {
    "matmuls": (SERIES[0], None),
    "attention": (SERIES[2], None),
    "elementwise": (SERIES[3], None),
    "loss": (SERIES[4], None),
    "optimizer": (SERIES[1], None),
    "rounding": (SERIES[1], "////"),
    "gradient_reduction": (MUTED, None),
    "communication": (MUTED, "////"),
    "other": (INK, "...."),
    "python": (INK, None),
}
"""Colour and hatching by class."""


@dataclass(frozen=True)
class Profile:
    """Account of a recorded step; `prefix` is the start of the names of its files."""

    prefix: str
    label: str
    clock: str
    seconds: Mapping[str, float]
    has_memory_snapshot: bool

    @property
    def total(self) -> float:
        """Duration of the step in seconds."""
        return sum(self.seconds.values())


def read_profiles(record: RunRecord) -> list[Profile]:
    """Return the accounts of the last recorded steps; damaged ones are omitted."""
    profiles = []
    for prefix, account in record.profiles.items():
        _, step, _, rank = prefix.split("_")
        seconds = _read_seconds(account.get("classes"))
        if seconds is not None:
            clock = "device" if account.get("clock") == "device" else "host"
            has_snapshot = account.get("has_memory_snapshot") is True
            label = f"step {step}, rank {rank}"
            profiles.append(Profile(prefix, label, clock, seconds, has_snapshot))
    return profiles[-MAX_PROFILES:]


def build_profile_figure(profiles: list[Profile]) -> ReportFigure:
    """Return a bar of the time by class for each recorded step."""
    classes = [name for name in TIME_CLASSES if any(one.seconds[name] > 0 for one in profiles)]

    def draw() -> Figure:
        height = 0.85 + 0.33 * len(profiles) + 0.22 * -(-len(classes) // 2)
        figure = Figure(figsize=(FIGURE_SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        for row, profile in enumerate(profiles):
            left = 0.0
            for name in classes:
                share = profile.seconds[name] / profile.total
                axes.barh(row, 100 * share, left=100 * left, height=0.72, **_get_style(name))
                if share >= _MIN_LABELLED_SHARE and _STYLES[name][1] is None:
                    middle, text = 100 * (left + share / 2), f"{100 * share:.0f}%"
                    axes.text(middle, row, text, color=PAPER, ha="center", va="center", fontsize=9)
                left += share
        labels = [f"{one.label}, {format_duration(one.total)}" for one in profiles]
        axes.set_yticks(range(len(profiles)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the step")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        patches = [Patch(label=TIME_CLASSES[name][0], **_get_style(name)) for name in classes]
        figure.legend(handles=patches, loc="outside upper left", ncols=2, fontsize=9)
        return figure

    caption = "The classes add up to the duration of the step, which recording lengthens."
    return ReportFigure(FIGURE_NAME, _format_alt_text(profiles[-1]), draw, caption=caption)


def build_profile_table(profiles: list[Profile]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return headers and rows: class, milliseconds and share of each step, and meaning."""
    headers = ["Class"]
    for profile in profiles:
        headers += [f"{profile.label}, ms", "Share"]
    rows = [
        (label, *_format_cells(profiles, name), meaning)
        for name, (label, meaning) in TIME_CLASSES.items()
    ]
    total = [cell for one in profiles for cell in (format_decimal(1e3 * one.total), "100 %")]
    return [*headers, "Meaning"], [*rows, ("Step", *total, "")]


def build_file_links(profiles: list[Profile]) -> list[tuple[str, list[str]]]:
    """Return label and paths of the files of each recorded step, relative to the run directory."""
    return [
        (one.label, [f"profiles/{one.prefix}{end}" for end in _list_file_endings(one)])
        for one in profiles
    ]


def _list_file_endings(profile: Profile) -> list[str]:
    return [*_FILE_ENDINGS, *(["_memory.pickle"] if profile.has_memory_snapshot else [])]


def _read_seconds(classes: Any) -> dict[str, float] | None:
    """Return the seconds of each class; None if any is invalid, or their sum is 0."""
    if not isinstance(classes, dict):
        return None
    values = {name: classes.get(name, 0.0) for name in TIME_CLASSES}
    if not all(is_finite_number(value) and value >= 0 for value in values.values()):
        return None
    return values if 0 < sum(values.values()) < float("inf") else None


def _format_cells(profiles: list[Profile], name: str) -> list[str]:
    cells = []
    for profile in profiles:
        seconds = profile.seconds[name]
        share = format_decimal(100 * seconds / profile.total)
        cells += [format_decimal(1e3 * seconds), f"{share} %"]
    return cells


def _format_alt_text(profile: Profile) -> str:
    ordered = sorted(profile.seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{TIME_CLASSES[name][0].lower()} {format_percent(100 * seconds / profile.total)}"
        for name, seconds in ordered
        if seconds > 0.002 * profile.total
    )
    return f"Time of {profile.label} by class of work: {parts}."


def _get_style(name: str) -> dict[str, Any]:
    colour, hatch = _STYLES[name]
    return {"facecolor": colour, "edgecolor": PAPER, "hatch": hatch, "linewidth": 0.7}
