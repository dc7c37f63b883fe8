"""Writing the report of a run, and the comparison of several runs, to files.

Files are replaced atomically, as a report may be open while it is written again.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.report import cost_figure, plan_comparison, seed_statistics, spike_figure
from hlat.report.figures import build_run_panels, build_standalone_svg
from hlat.report.goodput_figure import build_goodput_figure
from hlat.report.goodput_figure import format_caption as format_goodput_caption
from hlat.report.goodput_tables import format_accounting_note, format_goodput_summary
from hlat.report.html_page import PageFigure, build_interactive_figure, render_report_page
from hlat.report.run_comparison import build_comparison_panels, render_comparison_page
from hlat.report.run_record import RunRecord, load_run_record
from hlat.tracking.run_directory import replace_file


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `figures/` into a run directory.

    Args:
        run_dir: Directory of a finished, killed or running run.

    Returns:
        Path of the page.

    Raises:
        ConfigError: The directory contains no run.
        OSError: The report cannot be written.
    """
    return write_record_report(load_run_record(run_dir), run_dir)


def write_record_report(record: RunRecord, run_dir: Path) -> Path:
    """Write `report.html` and `figures/` of a run into a directory; return the page.

    Raises:
        OSError: The report cannot be written.
    """
    figures = _build_figures(record)
    _write_figures(run_dir / "figures", figures)
    page = run_dir / "report.html"
    replace_file(page, render_report_page(record, figures).encode())
    return page


def try_write_report(run_dir: Path) -> str:
    """Write the report of a finished run; print an error if it cannot be written.

    Returns:
        Uptime and goodput in one line; empty if the run had a single attempt.
    """
    record = load_run_record(run_dir)
    try:
        write_record_report(record, run_dir)
    except OSError as error:
        print(f"hlat: cannot write the report: {error}", file=sys.stderr)
    ledger = record.time_ledger
    return format_goodput_summary(ledger) if len(ledger.attempts) > 1 else ""


def render_report(record: RunRecord) -> str:
    """Return the page of a run without writing files."""
    return render_report_page(record, _build_figures(record))


def write_comparison(
    records: Sequence[RunRecord], output_dir: Path, skipped_points: Sequence[str] = ()
) -> Path:
    """Write `comparison.html` and `comparison/` of several runs; return the page.

    Args:
        records: Runs.
        output_dir: Directory of the page.
        skipped_points: Points of their sweep that cannot run.

    Raises:
        OSError: The files cannot be written.
    """
    figures = [build_interactive_figure(panel) for panel in build_comparison_panels(records)]
    costs = cost_figure.compute_measured_costs(records)
    baseline = cost_figure.get_baseline_usd(costs)
    if baseline is not None:
        caption = (
            f"100 % are {baseline:.3g} USD, the cost on the smallest number of nodes, from the "
            "median throughput and the price."
        )
        figure = cost_figure.build_cost_figure(costs, baseline)
        figures.append(PageFigure(figure, cost_figure.TITLE, caption))
    _write_figures(output_dir / "comparison", figures)
    page = output_dir / "comparison.html"
    seed_table = seed_statistics.build_seed_table(records)
    content = render_comparison_page(records, figures, seed_table, skipped_points)
    replace_file(page, content.encode())
    return page


def _build_figures(record: RunRecord) -> list[PageFigure]:
    figures = [build_interactive_figure(panel, record) for panel in build_run_panels(record)]
    if counts := spike_figure.count_spike_lengths(record):
        figure = spike_figure.build_spike_figure(counts)
        figures.append(PageFigure(figure, spike_figure.TITLE, spike_figure.CAPTION))
    if record.time_ledger.attempts:
        ledger = record.time_ledger
        caption = f"{format_goodput_caption(ledger)} {format_accounting_note(ledger)}".strip()
        figures.append(PageFigure(build_goodput_figure(ledger), caption=caption))
    if record.config and record.metrics:
        with suppress(ConfigError):  # the page contains the error
            comparisons = plan_comparison.compare_with_plan(record)
            figure = plan_comparison.build_plan_comparison_figure(comparisons)
            caption = " ".join(comparison.note for comparison in comparisons)
            figures.append(PageFigure(figure, caption=caption))
    return figures


def _write_figures(figures_dir: Path, figures: Sequence[PageFigure]) -> None:
    figures_dir.mkdir(parents=True, exist_ok=True)
    for page_figure in figures:
        file = figures_dir / page_figure.figure.name
        replace_file(file.with_suffix(".svg"), build_standalone_svg(page_figure.svg).encode())
        replace_file(file.with_suffix(".png"), page_figure.figure.render_png())
