"""Jinja templates of reports, for browsers and terminals."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from hlat.report.text_format import format_count, format_duration, format_gib

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(("html.j2",)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"duration": format_duration, "gib": format_gib, "thousands": format_count}


def render_text(template: str, **context: Any) -> list[str]:
    """Return the lines of a text for a terminal from a template."""
    return TEMPLATES.get_template(template).render(context).rstrip("\n").split("\n")
