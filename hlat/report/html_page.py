"""The report of a run as one HTML page.

A page contains everything it needs, so that it can be mailed or archived with its run. It follows
the dark scheme, and is legible on a phone, by a screen reader and without scripts. The templates
escape all text from the files of a run, which may contain markup.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hlat.config.config_errors import ConfigError
from hlat.report import (
    goodput_figure,
    goodput_tables,
    interactive_figures,
    plan_comparison,
    summary_tables,
)
from hlat.report.figures import (
    PALETTE_CSS,
    Panel,
    ReportFigure,
    build_panel_figure,
    format_caption,
    format_mark_legend,
)
from hlat.report.run_record import RunRecord
from hlat.report.text_format import format_value

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_ENVIRONMENT.globals.update(
    content_security_policy=interactive_figures.CONTENT_SECURITY_POLICY,
    max_table_rows=interactive_figures.MAX_TABLE_ROWS,
    palette_css=PALETTE_CSS,
    script=interactive_figures.SCRIPT,
    smoothing_options=interactive_figures.SMOOTHING_OPTIONS,
)


@dataclass(frozen=True)
class PageFigure:
    """A figure of a page.

    Attributes:
        figure: Figure as SVG and PNG.
        title: Title above the figure.
        caption: Caption below the figure.
        panel: Panel of an interactive figure; None for a static figure.
        record: Run with the restarts and phases to mark in an interactive figure.
    """

    figure: ReportFigure
    title: str = ""
    caption: str = ""
    panel: Panel | None = None
    record: RunRecord | None = None

    @cached_property
    def svg(self) -> str:
        """SVG element."""
        return self.figure.render_svg()

    @property
    def data(self) -> dict[str, Any]:
        """Data of an interactive figure for the script of the page."""
        assert self.panel is not None
        return interactive_figures.build_figure_data(self.panel, self.record)

    @property
    def table_columns(self) -> list[tuple[str, str]]:
        """Header and style of each column of an interactive figure's table."""
        assert self.panel is not None
        return interactive_figures.build_table_columns(self.panel)

    @property
    def table_rows(self) -> list[list[str]]:
        """Rows of an interactive figure's table."""
        assert self.panel is not None
        return interactive_figures.build_table_rows(self.panel)


def build_interactive_figure(panel: Panel, record: RunRecord | None = None) -> PageFigure:
    """Return the interactive figure of a panel.

    Args:
        panel: Panel to draw.
        record: Run with the restarts and phases to mark; None to mark none.
    """
    figure = build_panel_figure(panel, record)
    return PageFigure(figure, panel.title, format_caption(panel), panel, record)


def render_page(template: str, title: str, name: str, **context: Any) -> str:
    """Return a page as an HTML document.

    Args:
        template: Name of the template file.
        title: Type of the page.
        name: Name of what the page describes.
        context: Further variables of the template.
    """
    return _ENVIRONMENT.get_template(template).render(title=title, name=name, **context)


def render_report_page(record: RunRecord, figures: Sequence[PageFigure]) -> str:
    """Return the report of a run as an HTML document.

    Args:
        record: Run.
        figures: All figures of the run; those without a title have a section of their own.
    """
    ledger = record.time_ledger
    by_name = {figure.figure.name: figure for figure in figures if not figure.title}
    steps = [(f"step {step}", "number") for step in record.evaluations]
    long_values = {key: value for key, value in record.provenance.items() if _is_long(value)}
    short_values = {key: v for key, v in record.provenance.items() if key not in long_values}
    return render_page(
        "run_report.html.j2",
        "Run report",
        record.name,
        figures=[figure for figure in figures if figure.title],
        legend=format_mark_legend(record),
        summary_rows=summary_tables.build_summary_table(record),
        heldout_rows=summary_tables.build_heldout_table(record),
        heldout_columns=[("", "row"), *[*steps[:1], *steps[-1:]] * 2],
        time_figure=by_name.get(goodput_figure.FIGURE_NAME),
        time_rows=goodput_tables.build_time_table(ledger) if ledger.attempts else [],
        attempt_columns=[
            ("Attempt", "row number"),
            *((header, "number") for header in goodput_tables.ATTEMPT_HEADERS),
        ],
        attempt_rows=goodput_tables.build_attempt_table(ledger),
        plan_figure=by_name.get(plan_comparison.FIGURE_NAME),
        **_build_plan_context(record),
        data_rows=summary_tables.build_data_table(record),
        event_rows=summary_tables.build_event_table(record),
        provenance_rows=[
            (_format_key(key), format_value(value)) for key, value in short_values.items()
        ],
        details=[
            *([("Resolved configuration", record.config)] if record.config else []),
            *(
                (_format_key(key), value if isinstance(value, str) else json.dumps(value, indent=2))
                for key, value in long_values.items()
            ),
        ],
    )


def _build_plan_context(record: RunRecord) -> dict[str, Any]:
    context: dict[str, Any] = {"plan_error": "", "plan_rows": []}
    if record.config and record.metrics:
        try:
            comparisons = plan_comparison.compare_with_plan(record)
            context["plan_rows"] = plan_comparison.build_plan_comparison_table(comparisons)
        except ConfigError as error:
            context["plan_error"] = "; ".join(error.problems)
    return context


def _format_key(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _is_long(value: Any) -> bool:
    return len(format_value(value)) > 200 or (isinstance(value, str) and "\n" in value)
