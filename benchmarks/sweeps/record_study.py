"""Record the runs of a study: values, and a page with the tables and figures of `hlat report`.

Usage: python benchmarks/sweeps/record_study.py NAME --runs runs/STUDY
       (writes NAME.json, NAME.md and NAME_1.svg, NAME_2.svg, ...)

The directory has the runs of this study only.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from omegaconf import OmegaConf

from hlat.figures.report_figure import ReportFigure
from hlat.report.comparison_writer import build_result_figures
from hlat.study.lr_tuning import summarize_tunings
from hlat.study.run_comparison import load_run_records
from hlat.study.run_record import RunRecord
from hlat.study.study_result import StudyResult, build_study_result
from hlat.study.study_tables import build_point_table, build_result_tables
from hlat.tracking.text_format import format_markdown_table

HERE = Path(__file__).resolve().parent
_MACHINE_KEYS = ("python", "platform", "device", "git_revision")


def list_values(result: StudyResult) -> list[dict[str, Any]]:
    """Return the settings, the metric by seed, and the summaries of the runs of each point."""
    return [
        {
            "point": dict(point),
            "values": one.runs.values,
            "diverged": sorted(one.runs.diverged),
            "initial_values": dict(one.initial_values),
            "summaries": [
                {key: float(f"{value:.6g}") for key, value in each.items()}
                for each in one.summaries
            ],
        }
        for point, one in result.points.items()
    ]


def list_machines(records: list[RunRecord]) -> list[dict[str, Any]]:
    """Return the distinct machines and revisions of the runs."""
    machines: list[dict[str, Any]] = []
    for record in records:
        machine = {key: record.provenance[key] for key in _MACHINE_KEYS}
        machine["torch"] = record.provenance["packages"]["torch"]
        if machine not in machines:
            machines.append(machine)
    return machines


def set_baseline(record: RunRecord, baseline: str) -> RunRecord:
    """Return the record with another study.baseline, in YAML."""
    config = OmegaConf.create(record.config)
    config.study.baseline = OmegaConf.create(baseline)
    return replace(record, config=OmegaConf.to_yaml(config))


def format_page(name: str, result: StudyResult, figures: list[ReportFigure]) -> str:
    """Return question, verdicts, figures and tables in Markdown."""
    design, points = result.design, result.points.values()
    num_runs = sum(len(one.run_names) for one in points)
    lines = [
        f"# {name}: {design.question}",
        f"{num_runs} runs, {len(points)} points; {result.metric_label}. Design: "
        f"[{name}.yaml](../../sweeps/{name}.yaml). Written by `record_study.py`.",
        "\n".join(f"* {verdict}" for verdict in result.verdicts),
    ]
    for number, figure in enumerate(figures, start=1):
        lines += [f"![{figure.alt_text}]({name}_{number}.svg)", figure.caption]
    tables = build_result_tables(result)
    if not result.tunings:
        tables = {"Points": build_point_table(result), **tables}
    for caption, table in tables.items():
        lines += [f"{caption}:", "\n".join(format_markdown_table(*table))]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study")
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--baseline", help="study.baseline, if not that of the runs")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    records = load_run_records([arguments.runs])
    if arguments.baseline is not None:
        records = [set_baseline(record, arguments.baseline) for record in records]
    result = build_study_result(records)
    if result is None:
        parser.error(f"{arguments.runs} contains no runs of a study")
    recorded = arguments.output / f"{arguments.study}.json"
    content = {
        "study": arguments.study,
        "machines": list_machines(records),
        "points": list_values(result),
        "criteria": {
            each.name: [
                {"point": dict(point), "values": runs.values} for point, runs in each.points.items()
            ]
            for each in result.criteria
        },
        "verdicts": result.verdicts,
        **summarize_tunings(result.tunings, result.transfers),
    }
    recorded.write_text(json.dumps(content) + "\n")
    figures = build_result_figures(result)
    text = format_page(arguments.study, result, figures)
    recorded.with_suffix(".md").write_text(text)
    for number, figure in enumerate(figures, start=1):
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hlat"}):
            file = recorded.with_name(f"{arguments.study}_{number}.svg")
            figure.draw().savefig(file, metadata={"Date": None})
    print(text, end="")


if __name__ == "__main__":
    main()
