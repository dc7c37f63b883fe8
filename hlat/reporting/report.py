"""Writing the report into the run folder.

Each file is put in place whole, because a report may be opened while it is made again.
"""

import sys
from pathlib import Path

from hlat.reporting.figures import alone, draw, panels
from hlat.reporting.page import page
from hlat.reporting.record import read


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
    record = read(run_folder)
    figures = run_folder / "figures"
    figures.mkdir(exist_ok=True)
    drawings = [(panel, draw(panel, record)) for panel in panels(record)]
    for panel, svg in drawings:
        _replace(figures / f"{panel.name}.svg", alone(svg))
    report = run_folder / "report.html"
    _replace(report, page(record, drawings))
    return report


def try_report(run_folder: Path) -> None:
    """Write the report of a run that just ended; a disk that refuses it must not change how."""
    try:
        write_report(run_folder)
    except OSError as error:
        print(f"hlat: no report: {error}", file=sys.stderr)


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f".{path.name}.tmp")
    written.write_text(text, encoding="utf-8")
    written.replace(path)
