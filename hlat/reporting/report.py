"""Writing the report into the run folder.

Each file is put in place whole, because a report may be opened while it is made again.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hlat.config.errors import ConfigError
from hlat.reporting import bars, comparison, cost_figure, expectation, seeds, spikes
from hlat.reporting.figures import Panel, Picture, alone, panels, picture
from hlat.reporting.lifetime import sentence
from hlat.reporting.page import page
from hlat.reporting.record import Record, read

_WHOLE = "of the run on fewest nodes, by its median throughput and its price."


def write_report(run_folder: Path) -> Path:
    """Write `report.html` and `figures/` from what the run wrote down.

    Args:
        run_folder: The run's folder; the run may be finished, killed or still going on.

    Returns:
        The page.

    Raises:
        ConfigError: It is no run folder.
        OSError: The report cannot be written.
    """
    return write(read(run_folder), run_folder)


def write(record: Record, run_folder: Path) -> Path:
    """Write `report.html` and `figures/` of a record into a folder; return the page.

    Raises:
        OSError: The report cannot be written.
    """
    drawn = _drawn(record)
    _write_pictures(run_folder / "figures", drawn)
    report = run_folder / "report.html"
    _replace(report, _page(record, drawn).encode())
    return report


def render(record: Record) -> str:
    """Return the page of a record, and write nothing."""
    return _page(record, _drawn(record))


def compare(records: Sequence[Record], place: Path, left_out: Sequence[str] = ()) -> Path:
    """Write `comparison.html` and `comparison/` of several runs; return the page.

    Args:
        records: Runs.
        place: Where it is written.
        left_out: Points of their sweep that cannot run.

    Raises:
        OSError: They cannot be written.
    """
    drawn = [_Drawn(panel.title, "", picture(panel), panel) for panel in comparison.panels(records)]
    costs = cost_figure.measured(records)
    whole = cost_figure.of_fewest_nodes(costs)
    if whole is not None:
        shown = cost_figure.picture(costs, whole)
        drawn.append(_Drawn(cost_figure.TITLE, f"100 % are {whole:.3g} USD, {_WHOLE}", shown))
    _write_pictures(place / "comparison", drawn)
    report = place / "comparison.html"
    others = _others(drawn)
    content = comparison.page(records, _curves(drawn), others, seeds.table(records), left_out)
    _replace(report, content.encode())
    return report


@dataclass(frozen=True)
class _Drawn:
    """A figure of a page: what stands above and below it; its data, if it is of curves."""

    title: str
    caption: str
    picture: Picture
    panel: Panel | None = None

    @cached_property
    def svg(self) -> str:
        return self.picture.svg()


def _drawn(record: Record) -> list[_Drawn]:
    """Return all figures of a run."""
    found = [_Drawn(panel.title, "", picture(panel, record), panel) for panel in panels(record)]
    if lasted := spikes.lengths(record):
        found.append(_Drawn(spikes.TITLE, spikes.CAPTION, spikes.picture(lasted)))
    if record.lifetime.attempts:
        found.append(_Drawn("", "", bars.picture(record.lifetime)))
    if record.config and record.metrics:
        with suppress(ConfigError):  # the page tells it
            found.append(_Drawn("", "", expectation.picture(expectation.parts(record))))
    return found


def _page(record: Record, drawn: Sequence[_Drawn]) -> str:
    by_name = {one.picture.name: one.svg for one in drawn}
    time, plan = by_name.get(bars.NAME, ""), by_name.get(expectation.NAME, "")
    return page(record, _curves(drawn), time, _others(drawn), plan)


def _others(drawn: Sequence[_Drawn]) -> list[tuple[str, str, str]]:
    return [(one.title, one.svg, one.caption) for one in drawn if one.panel is None and one.title]


def _curves(drawn: Sequence[_Drawn]) -> list[tuple[Panel, str]]:
    return [(one.panel, one.svg) for one in drawn if one.panel is not None]


def _write_pictures(folder: Path, drawn: Sequence[_Drawn]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for one in drawn:
        _replace(folder / f"{one.picture.name}.svg", alone(one.svg).encode())
        _replace(folder / f"{one.picture.name}.png", one.picture.png())


def try_report(run_folder: Path) -> str:
    """Write the report of a run that just ended; a disk that refuses it must not change how.

    Returns:
        Uptime and goodput in a line, if it took more than one attempt; else nothing.
    """
    record = read(run_folder)
    try:
        write(record, run_folder)
    except OSError as error:
        print(f"hlat: no report: {error}", file=sys.stderr)
    return sentence(record.lifetime) if len(record.lifetime.attempts) > 1 else ""


def _replace(path: Path, content: bytes) -> None:
    written = path.with_name(f".{path.name}.tmp")
    written.write_bytes(content)
    written.replace(path)
