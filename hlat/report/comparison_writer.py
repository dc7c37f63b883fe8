"""Pages of several runs as HTML, with their figures."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hlat.figures.page_templates import render_page
from hlat.figures.report_figure import ReportFigure, build_panel_figure
from hlat.plan import cost_figure
from hlat.report import comparison_curves, run_header, study_figures, tuning_figures
from hlat.report.report_writer import TEMPLATES, write_figures
from hlat.report.table_columns import detect_columns
from hlat.storage.durable_files import replace_file
from hlat.study import lr_tuning, run_comparison, study_result
from hlat.study.run_record import RunRecord


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
    write_figures(output_dir / "comparison", [*figures, *effect_figures, *bands])
    headers, rows = run_comparison.build_comparison_table(records)
    seed_headers, seed_rows = run_comparison.build_seed_table(records) or ([], [])
    common_headers, common_rows = run_comparison.build_common_table(records) or ([], [])
    effects = study_result.build_effect_table(study) if study else ([], [])
    factors = study_result.build_factor_table(study) if study else ([], [])
    points = study_result.build_point_table(study) if study else ([], [])
    optima = lr_tuning.build_tuning_table(study.tunings) if study and study.tunings else ([], [])
    count = f"{len(records)} runs"
    content = render_page(
        TEMPLATES / "comparison.html.j2",
        title=f"Study of {count}" if study and study.design.question else "Comparison",
        name=(study and study.design.question) or count,
        facts=run_header.build_shared_facts(records),
        columns=detect_columns(headers, rows),
        rows=rows,
        common_columns=detect_columns(common_headers, common_rows),
        common_rows=common_rows,
        seed_columns=detect_columns(seed_headers, seed_rows),
        seed_rows=seed_rows,
        study=study,
        study_result=study_result,
        study_figures=effect_figures,
        effect_columns=detect_columns(*effects),
        effect_rows=effects[1],
        optimum_columns=detect_columns(*optima),
        optimum_rows=optima[1],
        tuning_caption=lr_tuning.TUNING_CAPTION,
        factor_columns=detect_columns(*factors),
        factor_rows=factors[1],
        point_columns=detect_columns(*points),
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
