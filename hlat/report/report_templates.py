"""Jinja templates of reports, for browsers and terminals."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from hlat.config.redaction import redact_text
from hlat.tracking import text_format

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(("html.j2",)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "duration": text_format.format_duration,
    "fraction": text_format.format_fraction,
    "gib": text_format.format_gib,
    "short": text_format.format_short,
    "thousands": text_format.format_count,
    "usd": text_format.format_usd,
}


def render_page(template: str, **context: Any) -> str:
    """Return a page for a browser from a template."""
    from hlat.report import interactive_figures  # drawing is slow to import
    from hlat.report.figures import PALETTE_CSS

    TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    TEMPLATES.globals.update(interactive_figures=interactive_figures, palette_css=PALETTE_CSS)
    return redact_text(TEMPLATES.get_template(template).render(context))


def render_text(template: str, **context: Any) -> list[str]:
    """Return the lines of a text for a terminal from a template."""
    return TEMPLATES.get_template(template).render(context).rstrip("\n").split("\n")
