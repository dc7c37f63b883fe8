"""Pages of a run and of several runs as HTML, and their figures.

A page contains everything it needs, so that it can be mailed or archived with its run. It follows
the dark scheme, and is legible on a phone, by a screen reader and without scripts. The templates
escape all text from the files of a run, which may contain markup. Files are replaced atomically, as
a report may be open while it is written again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hlat.figures.page_templates import render_page
from hlat.figures.report_figure import (
    ReportFigure,
    build_panel_figure,
    build_run_panels,
    format_mark_legend,
)
from hlat.plan import cost_figure, plan_figure
from hlat.report import (
    comparison_curves,
    goodput_section,
    profile_section,
    router_figure,
    run_header,
    spike_figure,
    study_figures,
    tuning_figures,
)
from hlat.storage.durable_files import replace_file
from hlat.study import lr_tuning, run_comparison, study_result, summary_tables
from hlat.study.run_record import RunRecord, load_run_record
from hlat.tracking.run_directory import validate_no_symlinks
from hlat.tracking.text_format import UNKNOWN, format_value

_TEMPLATES = Path(__file__).with_name("templates")
_MAX_UNBROKEN = 24
"""Characters of a cell that is not broken into lines."""


def write_report(run_dir: Path, record: RunRecord | None = None) -> Path:
    """Write `report.html` and `figures/` into a run directory; return the page.

    `record` is the content of the directory, if it is known. Raise ConfigError if it contains no
    run.
    """
    validate_no_symlinks(run_dir)
    record = record or load_run_record(run_dir)
    figures = _build_figures(record)
    _write_figures(run_dir / "figures", figures)
    page = run_dir / "report.html"
    replace_file(page, _render_report(record, figures, has_files=True).encode())
    return page


def render_report(record: RunRecord) -> str:
    """Return the page of a run without writing files."""
    return _render_report(record, _build_figures(record))


def write_comparison(
    records: Sequence[RunRecord],
    output_dir: Path,
    untrained: run_comparison.UntrainedPoints | None = None,
) -> Path:
    """Write `comparison.html` and `comparison/` of several runs; return the page.

    `untrained` are the points of their sweep without a run.
    """
    untrained = untrained or run_comparison.UntrainedPoints()
    figures = [*map(build_panel_figure, comparison_curves.build_comparison_panels(records))]
    study = study_result.build_study_result(records, untrained.num_seeds)
    costs = cost_figure.compute_measured_costs(records)
    baseline = cost_figure.get_baseline_usd(costs)
    if baseline is not None:
        caption = (
            f"100 % are {baseline:.3g} USD, the cost on the smallest number of nodes, from the "
            "median throughput and the price."
        )
        figure = cost_figure.build_cost_figure(costs, baseline)
        figures.append(replace(figure, title=cost_figure.TITLE, caption=caption))
    effect_figures = _build_result_figures(study) if study else []
    bands = study_figures.build_band_figures(records, study) if study else []
    _write_figures(output_dir / "comparison", [*figures, *effect_figures, *bands])
    headers, rows = run_comparison.build_comparison_table(records)
    seed_headers, seed_rows = run_comparison.build_seed_table(records) or ([], [])
    common_headers, common_rows = run_comparison.build_common_table(records) or ([], [])
    effects = study_result.build_effect_table(study) if study else ([], [])
    factors = study_result.build_factor_table(study) if study else ([], [])
    points = study_result.build_point_table(study) if study else ([], [])
    optima = lr_tuning.build_tuning_table(study.tunings) if study and study.tunings else ([], [])
    count = f"{len(records)} runs"
    content = render_page(
        _TEMPLATES / "comparison.html.j2",
        title=f"Study of {count}" if study and study.design.question else "Comparison",
        name=(study and study.design.question) or count,
        facts=run_header.build_shared_facts(records),
        columns=_detect_columns(headers, rows),
        rows=rows,
        common_columns=_detect_columns(common_headers, common_rows),
        common_rows=common_rows,
        seed_columns=_detect_columns(seed_headers, seed_rows),
        seed_rows=seed_rows,
        study=study,
        study_result=study_result,
        study_figures=effect_figures,
        effect_columns=_detect_columns(*effects),
        effect_rows=effects[1],
        optimum_columns=_detect_columns(*optima),
        optimum_rows=optima[1],
        tuning_caption=lr_tuning.TUNING_CAPTION,
        factor_columns=_detect_columns(*factors),
        factor_rows=factors[1],
        point_columns=_detect_columns(*points),
        point_rows=points[1],
        untrained=untrained,
        figures=figures,
    )
    page = output_dir / "comparison.html"
    replace_file(page, content.encode())
    if study and study.tunings:
        summary = lr_tuning.summarize_tunings(study.tunings, study.transfers)
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        replace_file(output_dir / "best_learning_rates.json", text.encode())
    return page


def _build_result_figures(study: study_result.StudyResult) -> list[ReportFigure]:
    """Return the figures of optima or effects."""
    if study.tunings:
        return tuning_figures.build_tuning_figures(study)
    return study_figures.build_study_figures(study)


def _build_figures(record: RunRecord) -> list[ReportFigure]:
    """Return all figures of a run; those without a title have a section of their own."""
    figures = [build_panel_figure(panel, record) for panel in build_run_panels(record)]
    if counts := spike_figure.count_spike_lengths(record):
        figures.append(spike_figure.build_spike_figure(counts))
    figures += router_figure.build_router_figures(record)
    if record.time_ledger.attempts:
        figures.append(goodput_section.build_goodput_figure(record.time_ledger))
    if profiles := profile_section.read_profiles(record):
        figures.append(profile_section.build_profile_figure(profiles))
    comparisons, _ = plan_figure.try_compare_with_plan(record)
    if comparisons:
        figures.append(plan_figure.build_plan_comparison_figure(comparisons))
    return figures


def _write_figures(figures_dir: Path, figures: Sequence[ReportFigure]) -> None:
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
        _TEMPLATES / "run_report.html.j2",
        title="Run report",
        name=record.name,
        facts=run_header.build_run_facts(record),
        figures=[figure for figure in figures if figure.title],
        legend=format_mark_legend(record),
        summary_rows=summary_tables.build_summary_table(record),
        heldout_rows=summary_tables.build_heldout_table(record),
        heldout_columns=_build_columns(
            ["", *[*steps[:1], *steps[-1:]] * 2, *summary_tables.HELDOUT_HEADERS], "row"
        ),
        time_figure=by_name.get(goodput_section.FIGURE_NAME),
        time_rows=goodput_section.build_time_table(ledger) if ledger.attempts else [],
        attempt_columns=_build_columns(goodput_section.ATTEMPT_HEADERS, "row number"),
        attempt_rows=goodput_section.build_attempt_table(ledger),
        plan_figure=by_name.get(plan_figure.FIGURE_NAME),
        plan_rows=plan_figure.build_plan_comparison_table(comparisons),
        plan_error=plan_error,
        profile_figure=by_name.get(profile_section.FIGURE_NAME),
        profile_columns=_detect_columns(profile_headers, profile_rows),
        profile_rows=profile_rows,
        profile_files=profile_section.build_file_links(profiles),
        has_files=has_files,
        sample_tables=summary_tables.build_sample_tables(record),
        data_rows=summary_tables.build_data_table(record),
        event_tables=summary_tables.build_event_tables(record),
        provenance_rows=provenance,
        details=details,
    )


def _build_columns(headers: Sequence[str], first_style: str) -> list[tuple[str, str]]:
    """Return header and style of the columns of a table of numbers."""
    return [(header, "number" if i else first_style) for i, header in enumerate(headers)]


def _detect_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
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
