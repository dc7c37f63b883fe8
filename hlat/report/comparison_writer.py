"""Pages of several runs as HTML, with their figures."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hlat.config.seeds import pop_seeds
from hlat.figures.page_templates import render_page
from hlat.figures.report_figure import (
    METRIC_PANELS,
    Panel,
    ReportFigure,
    build_panel_figure,
    has_values,
)
from hlat.plan import cost_figure
from hlat.report import rate_figure, study_figures, tradeoff_figure
from hlat.report.report_writer import TEMPLATES, build_shared_facts, detect_columns, write_figures
from hlat.storage.durable_files import replace_file
from hlat.study import lr_tuning, run_comparison, study_result, study_tables
from hlat.study.metric_curves import (
    Curve,
    build_band_curve,
    build_heldout_curves,
    build_metric_curve,
)
from hlat.study.run_comparison import find_config_differences, group_seeds
from hlat.study.run_record import RunRecord
from hlat.tracking.setting_labels import format_settings, is_generated_name

_MAX_LABEL_LENGTH = 48
"""Characters of a curve's label; longer settings are replaced by the name of the run."""


def write_comparison(
    records: Sequence[RunRecord],
    output_dir: Path,
    untrained: run_comparison.UntrainedPoints | None = None,
) -> Path:
    """Write `comparison.html` and `comparison/` of several runs; return the page.

    `untrained` are the points of their sweep without a run.
    """
    untrained = untrained or run_comparison.UntrainedPoints()
    figures = [*map(build_panel_figure, build_comparison_panels(records))]
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
    effect_figures = build_result_figures(study) if study else []
    bands = study_figures.build_band_figures(records, study) if study else []
    write_figures(output_dir / "comparison", [*figures, *effect_figures, *bands])
    count = f"{len(records)} runs"
    content = render_page(
        TEMPLATES / "comparison.html.j2",
        title=f"Study of {count}" if study and study.design.question else "Comparison",
        name=(study and study.design.question) or count,
        facts=build_shared_facts(records),
        runs=_style_table(run_comparison.build_comparison_table(records)),
        common=_style_table(run_comparison.build_common_table(records)),
        seeds=_style_table(run_comparison.build_seed_table(records)),
        study=study,
        study_figures=effect_figures,
        study_tables=_style_study_tables(study) if study else {},
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


def _style_study_tables(
    study: study_result.StudyResult,
) -> dict[str, tuple[list[tuple[str, str]], Sequence[Sequence[str]]]]:
    """Return all tables of a study by caption, that of the points last."""
    tables = study_tables.build_result_tables(study)
    tables[study_tables.POINTS_CAPTION] = study_tables.build_point_table(study)
    return {caption: _style_table(table) for caption, table in tables.items()}


def _style_table(
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None,
) -> tuple[list[tuple[str, str]], Sequence[Sequence[str]]]:
    """Return the columns with their styles, and the rows; both are empty without a table."""
    headers, rows = table or ([], [])
    return detect_columns(headers, rows), rows


def build_result_figures(study: study_result.StudyResult) -> list[ReportFigure]:
    """Return the figures of optima or effects."""
    if study.criteria:
        return [rate_figure.build_rate_figure(study)]
    if study.tunings:
        return study_figures.build_tuning_figures(study)
    tradeoff = tradeoff_figure.build_tradeoff_figure(study)
    return study_figures.build_study_figures(study) + ([tradeoff] if tradeoff else [])


def build_comparison_panels(records: Sequence[RunRecord]) -> list[Panel]:
    """Return the panels with curves of all runs that have values.

    If runs differ in their seed only, a panel contains a band for each configuration, too.
    """
    labels, groups = label_runs(records), label_groups(records)

    def build_curves(build: Callable[[RunRecord], Curve | None]) -> list[Curve]:
        curves = [build(record) for record in records]
        known = {
            i: replace(curve, label=labels[i])
            for i, curve in enumerate(curves)
            if curve is not None
        }
        return _add_bands(known, groups) if groups else [*known.values()]

    def build_panel(key: str, title: str, unit: str) -> Panel:
        curves = build_curves(lambda record: build_metric_curve(record, key))
        return Panel(key, title, unit, curves, can_smooth=key == "loss")

    loss, *others = [build_panel(*panel) for panel in METRIC_PANELS]
    means = build_curves(lambda record: next(iter(build_heldout_curves(record)[-1:]), None))
    heldout = Panel("heldout", "Held-out text, mean", "bits per byte", means)
    throughput = build_panel("tokens_per_second", "Throughput", "tokens per second")
    panels = [loss, heldout, *others, throughput]
    return [panel for panel in panels if any(map(has_values, panel.curves))]


def label_groups(records: Sequence[RunRecord]) -> dict[str, list[int]]:
    """Return the indices of the runs in each group of `group_seeds` by a label."""
    axes = find_config_differences(records)
    pop_seeds(axes)
    labels: dict[str, list[int]] = {}
    for number, (point, runs) in enumerate(group_seeds(records).items(), start=1):
        label = _format_label(dict(zip(axes, point, strict=True)))
        label = label if len(label) <= _MAX_LABEL_LENGTH else f"setting {number}"
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        label = f"{label} ({seeds})" if label else seeds
        labels[f"setting {number}, {label}" if label in labels else label] = runs
    return labels


def label_runs(records: Sequence[RunRecord]) -> list[str]:
    """Return a unique label for the curves of each run: its name, if the user has chosen it.

    Otherwise the settings that differ, such as `lr=0.1, seed=2`, unless they are those of another
    run, or too long.
    """
    axes = find_config_differences(records)
    labels = [
        _format_label({key: values[i] for key, values in axes.items()}) for i in range(len(records))
    ]
    counts = Counter(labels)
    return [
        label
        if is_generated_name(record.name)
        and counts[label] == 1
        and 0 < len(label) <= _MAX_LABEL_LENGTH
        else record.name
        for label, record in zip(labels, records, strict=True)
    ]


def _format_label(settings: Mapping[str, str]) -> str:
    """Return settings as a label, without those of tracking, such as the group in W&B."""
    return format_settings(
        {key: value for key, value in settings.items() if not key.startswith("tracking.")}
    )


def _add_bands(curves: Mapping[int, Curve], groups: Mapping[str, list[int]]) -> list[Curve]:
    """Return the curves of runs by index, and a band for each group of them."""
    runs, bands = [], []
    for group, (label, indices) in enumerate(groups.items()):
        members = [curves[i] for i in indices if i in curves]
        runs += [
            replace(curve, kind="run", style=(group, seed)) for seed, curve in enumerate(members)
        ]
        if known := [curve for curve in members if has_values(curve)]:
            band = build_band_curve(label, known)
            bands.append(replace(band, style=(group, group)))
    return [*runs, *bands]
