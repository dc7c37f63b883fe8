"""Writing the report into the run folder.

Each file is put in place whole, because a report may be opened while it is made again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hlat.reporting import bars, comparison, seeds, spikes
from hlat.reporting.figures import Panel, alone, draw, panels
from hlat.reporting.lifetime import sentence
from hlat.reporting.page import page
from hlat.reporting.record import Record, read


def write_report(run_folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg` from what the run wrote down.

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
    """Write `report.html` and `figures/*.svg` of a record into a folder; return the page.

    Raises:
        OSError: The report cannot be written.
    """
    figures = run_folder / "figures"
    figures.mkdir(exist_ok=True)
    drawings, time, spiked = _drawn(record)
    drawn = {panel.name: svg for panel, svg in drawings} | {bars.NAME: time, spikes.NAME: spiked}
    for name, svg in drawn.items():
        if svg:
            _replace(figures / f"{name}.svg", alone(svg))
    report = run_folder / "report.html"
    _replace(report, page(record, drawings, time, spiked))
    return report


def render(record: Record) -> str:
    """Return the page of a record, and write nothing."""
    return page(record, *_drawn(record))


def _drawn(record: Record) -> tuple[list[tuple[Panel, str]], str, str]:
    """Return all figures: the panels, where the time went, how long spikes lasted; or nothing."""
    drawings = [(panel, draw(panel, record)) for panel in panels(record)]
    time = bars.draw(record.lifetime) if record.lifetime.attempts else ""
    lasted = spikes.lengths(record)
    return drawings, time, spikes.draw(lasted) if lasted else ""


def compare(records: Sequence[Record], place: Path, left_out: Sequence[str] = ()) -> Path:
    """Write `comparison.html` and `comparison/*.svg` of several runs; return the page.

    Args:
        records: Runs.
        place: Where it is written.
        left_out: Points of their sweep that cannot run.

    Raises:
        OSError: They cannot be written.
    """
    figures = place / "comparison"
    figures.mkdir(parents=True, exist_ok=True)
    drawings = comparison.drawings(records)
    for panel, svg in drawings:
        _replace(figures / f"{panel.name}.svg", alone(svg))
    report = place / "comparison.html"
    _replace(report, comparison.page(records, drawings, seeds.table(records), left_out))
    return report


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


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f".{path.name}.tmp")
    written.write_text(text, encoding="utf-8")
    written.replace(path)
