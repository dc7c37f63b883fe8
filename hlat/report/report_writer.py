"""Page of a run as HTML, and its figures.

A page contains everything it needs, so that it can be mailed or archived with its run. It follows
the dark scheme, and is legible on a phone, by a screen reader and without scripts. The templates
escape all text from the files of a run, which may contain markup. Files are replaced atomically, as
a report may be open while it is written again.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hlat.config.batch_steps import format_growth
from hlat.figures.page_templates import render_page
from hlat.figures.report_figure import (
    FIGURE_SIZE,
    SERIES,
    ReportFigure,
    build_panel_figure,
    build_run_panels,
    format_mark_legend,
)
from hlat.model.decoder_spec import count_parameters
from hlat.plan import plan_figure
from hlat.report import (
    goodput_section,
    profile_section,
    router_figure,
)
from hlat.storage.durable_files import replace_file
from hlat.study import registered_prediction, summary_tables
from hlat.study.run_record import RunRecord, get_number, load_run_record
from hlat.tracking.lost_work import exclude_rolled_back_events
from hlat.tracking.run_directory import validate_no_symlinks
from hlat.tracking.text_format import (
    UNKNOWN,
    format_count,
    format_percent,
    format_short,
    format_value,
)

TEMPLATES = Path(__file__).with_name("templates")
_SPIKE_CAPTION = "Spike: the gradient norm exceeds its running average by recovery.spike_margin."
_MAX_UNBROKEN = 24
"""Characters of a cell that is not broken into lines."""
_MAX_VALUES = 4
"""Maximum number of different values of a fact that a comparison lists."""


def write_report(run_dir: Path, record: RunRecord | None = None) -> Path:
    """Write `report.html` and `figures/` into a run directory; return the page.

    `record` is the content of the directory, if it is known. Raise ConfigError if it contains no
    run.
    """
    validate_no_symlinks(run_dir)
    record = record or load_run_record(run_dir)
    figures = _build_figures(record)
    write_figures(run_dir / "figures", figures)
    page = run_dir / "report.html"
    replace_file(page, _render_report(record, figures, has_files=True).encode())
    return page


def render_report(record: RunRecord) -> str:
    """Return the page of a run without writing files."""
    return _render_report(record, _build_figures(record))


def _build_figures(record: RunRecord) -> list[ReportFigure]:
    """Return all figures of a run; those without a title have a section of their own."""
    figures = [build_panel_figure(panel, record) for panel in build_run_panels(record)]
    if counts := count_spike_lengths(record):
        figures.append(build_spike_figure(counts))
    figures += router_figure.build_router_figures(record)
    if record.time_ledger.attempts:
        figures.append(goodput_section.build_goodput_figure(record.time_ledger))
    if profiles := profile_section.read_profiles(record):
        figures.append(profile_section.build_profile_figure(profiles))
    comparisons, _ = plan_figure.try_compare_with_plan(record)
    if comparisons:
        figures.append(plan_figure.build_plan_comparison_figure(comparisons))
    return figures


def write_figures(figures_dir: Path, figures: Sequence[ReportFigure]) -> None:
    """Write SVG and PNG files of figures."""
    figures_dir.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        for suffix in (".svg", ".png"):
            replace_file(figures_dir / f"{figure.name}{suffix}", figure.render_file(suffix))


def _render_report(
    record: RunRecord, figures: Sequence[ReportFigure], has_files: bool = False
) -> str:
    """Return the page of a run; `has_files` if the files of the run are next to it."""
    ledger, profiles = record.time_ledger, profile_section.read_profiles(record)
    profile_headers, profile_rows = profile_section.build_profile_table(profiles)
    by_name = {figure.name: figure for figure in figures if not figure.title}
    steps = [f"step {step}" for step in record.evaluations]
    comparisons, plan_error = plan_figure.try_compare_with_plan(record)
    details = [("Resolved configuration", record.config)] if record.config else []
    provenance = []
    for key, value in record.provenance.items():
        label, text = key.replace("_", " ").capitalize(), format_value(value)
        if len(text) > 200 or (isinstance(value, str) and "\n" in value):
            long_text = value if isinstance(value, str) else json.dumps(value, indent=2)
            details.append((label, long_text))
        else:
            provenance.append((label, text))
    return render_page(
        TEMPLATES / "run_report.html.j2",
        title="Run report",
        name=record.name,
        facts=build_run_facts(record),
        figures=[figure for figure in figures if figure.title],
        legend=format_mark_legend(record),
        summary_rows=summary_tables.build_summary_table(record),
        heldout_rows=summary_tables.build_heldout_table(record),
        heldout_columns=build_columns(
            ["", *[*steps[:1], *steps[-1:]] * 2, *summary_tables.HELDOUT_HEADERS], "row"
        ),
        time_figure=by_name.get(goodput_section.FIGURE_NAME),
        time_rows=goodput_section.build_time_table(ledger) if ledger.attempts else [],
        attempt_columns=build_columns(goodput_section.ATTEMPT_HEADERS, "row number"),
        attempt_rows=goodput_section.build_attempt_table(ledger),
        plan_figure=by_name.get(plan_figure.FIGURE_NAME),
        plan_rows=plan_figure.build_plan_comparison_table(comparisons),
        plan_error=plan_error,
        prediction=registered_prediction.compare_prediction(record),
        profile_figure=by_name.get(profile_section.FIGURE_NAME),
        profile_columns=detect_columns(profile_headers, profile_rows),
        profile_rows=profile_rows,
        profile_files=profile_section.build_file_links(profiles),
        has_files=has_files,
        sample_tables=summary_tables.build_sample_tables(record),
        data_rows=summary_tables.build_data_table(record),
        event_tables=summary_tables.build_event_tables(record),
        provenance_rows=provenance,
        details=details,
    )


def count_spike_lengths(record: RunRecord) -> dict[int, int]:
    """Return the number of spikes of each length, in logged steps, in ascending order.

    A spike is a logged step whose gradient norm exceeds its running average by a margin (HLAT
    paper, section IV-A). Spikes at consecutive logged steps count as one spike of that length.
    """
    events = exclude_rolled_back_events(record.events)
    spike_steps = sorted({row["step"] for row in events if row.get("event") == "spike"})
    logged_steps = np.array([get_number(row, "step") for row in record.metrics])
    indices = np.searchsorted(logged_steps, spike_steps)
    starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(indices)).tolist()
    return dict(sorted(Counter(lengths).items()))


def build_spike_figure(counts: dict[int, int]) -> ReportFigure:
    """Return a bar chart of the spike lengths (HLAT paper, figure 2)."""

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        positions = range(len(counts))
        bars = axes.bar(positions, [*counts.values()], width=0.7, color=SERIES[0])
        axes.bar_label(bars, fontsize=9)
        axes.set_xticks(positions, [str(length) for length in counts])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("consecutive logged steps")
        axes.set_ylabel("occurrences")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return figure

    alt_text, title = format_spike_text(counts), "Length of gradient spikes"
    return ReportFigure("spikes", alt_text, draw, title, _SPIKE_CAPTION)


def format_spike_text(counts: dict[int, int]) -> str:
    """Return the alternative text of the figure."""
    total = sum(counts.values())
    single = format_percent(100 * counts.get(1, 0) / total)
    return (
        f"{format_count(total)} gradient spikes; {single} lasted a single logged step, the longest "
        f"{max(counts)}."
    )


def build_columns(headers: Sequence[str], first_style: str) -> list[tuple[str, str]]:
    """Return header and style of the columns of a table of numbers."""
    return [(header, "number" if i else first_style) for i, header in enumerate(headers)]


def detect_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return header and style of the columns; those that contain texts are aligned to the left."""
    cells = zip(*rows, strict=True) if rows else [()] * len(headers)
    styles = [
        "number" if all(map(_is_number, column)) else "event" if _is_short(column) else ""
        for column in cells
    ]
    return [
        (header, style if i else "row name")
        for i, (header, style) in enumerate(zip(headers, styles, strict=True))
    ]


def _is_short(cells: Sequence[str]) -> bool:
    return all(len(cell) <= _MAX_UNBROKEN for cell in cells)


def _is_number(cell: str) -> bool:
    return cell == UNKNOWN or re.match(r"[+-]?\d", cell) is not None


def build_run_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return names and values for the header of a page, and what changed during the run.

    The values, which are those of the last attempt, are missing if the configuration cannot be
    parsed.
    """
    changes = record.setting_changes.items()
    return _list_facts(record) + [
        (f"Changed at step {step}", "; ".join(lines)) for step, lines in changes
    ]


def build_shared_facts(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the facts of several runs; different values are listed, or counted."""
    columns: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in build_run_facts(record):
            columns.setdefault(name, {})[value] = None
    return [
        (name, " | ".join(values) if len(values) <= _MAX_VALUES else f"{len(values)} values")
        for name, values in columns.items()
    ]


def _list_facts(record: RunRecord) -> list[tuple[str, str]]:
    settings = record.model_settings
    if settings is None:
        return []
    batch, hardware, recorded = settings.batch, settings.hardware, record.flat_config
    sequences = f"{format_count(batch.global_batch_size)} x {format_count(batch.sequence_length)}"
    tokens = f"{format_count(batch.tokens_per_step)} tokens"
    nodes = f"{hardware.nodes} x " if hardware.nodes > 1 else ""
    return [
        ("Model", settings.model.name),
        ("Parameters", format_short(count_parameters(settings.model))),
        ("Learning rate", format_short(get_number(recorded, "optimizer.lr"))),
        ("Schedule", str(recorded.get("schedule.name", UNKNOWN))),
        ("Batch", f"{sequences} = {tokens}{format_growth(batch)}"),
        ("Optimizer", str(recorded.get("optimizer.name", UNKNOWN))),
        ("Precision", str(recorded.get("precision.name", UNKNOWN))),
        ("Hardware", f"{nodes}{hardware.name}"),
        ("Seed", str(recorded.get("run.seed", UNKNOWN))),
    ]
