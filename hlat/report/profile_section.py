"""Recorded steps of a run: their time by class of work, and their files (docs/profiling.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hlat.engine.step_account import TIME_CLASSES
from hlat.figures.report_figure import INK, MUTED, SERIES, ReportFigure
from hlat.figures.share_bars import Styles, draw_share_bars, format_shares
from hlat.study.run_record import RunRecord
from hlat.tracking.row_validation import is_finite_number
from hlat.tracking.text_format import format_decimal, format_duration

FIGURE_NAME = "profile"
"""File name without extension."""
MAX_PROFILES = 12
"""Maximum number of recorded steps in the figure and the table; the last ones are shown."""
_FILE_ENDINGS = (".json.gz", "_operators.csv", "_modules.csv", "_account.json")
"""Ends of the names of the files of each recorded step."""
_STYLES: Styles = {
    "matmuls": (TIME_CLASSES["matmuls"][0], SERIES[0], None),
    "attention": (TIME_CLASSES["attention"][0], SERIES[2], None),
    "elementwise": (TIME_CLASSES["elementwise"][0], SERIES[3], None),
    "loss": (TIME_CLASSES["loss"][0], SERIES[4], None),
    "optimizer": (TIME_CLASSES["optimizer"][0], SERIES[1], None),
    "rounding": (TIME_CLASSES["rounding"][0], SERIES[1], "////"),
    "gradient_reduction": (TIME_CLASSES["gradient_reduction"][0], MUTED, None),
    "communication": (TIME_CLASSES["communication"][0], MUTED, "////"),
    "other": (TIME_CLASSES["other"][0], INK, "...."),
    "python": (TIME_CLASSES["python"][0], INK, None),
}
"""Label, colour and hatching by class."""


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

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the duration by class."""
        return {name: self.seconds[name] / self.total for name in TIME_CLASSES}


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
    bars = [(f"{one.label}, {format_duration(one.total)}", one.shares) for one in profiles]
    alt_text = (
        f"Time of {profiles[-1].label} by class of work: "
        f"{format_shares(profiles[-1].shares, _STYLES)}."
    )
    caption = "The classes add up to the duration of the step, which recording lengthens."
    draw = partial(draw_share_bars, bars, _STYLES, classes, "% of the step")
    return ReportFigure(FIGURE_NAME, alt_text, draw, caption=caption)


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
