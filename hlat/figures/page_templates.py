"""Jinja templates of pages for browsers and of text for terminals.

The templates of a package are in its directory `templates`. They can extend and include those of
this package.
"""

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from hlat.config.redaction import redact_text
from hlat.tracking import text_format

_FILTERS = {
    "duration": text_format.format_duration,
    "fraction": text_format.format_fraction,
    "gib": text_format.format_gib,
    "short": text_format.format_short,
    "thousands": text_format.format_count,
    "usd": text_format.format_usd,
}


def render_page(template: Path, **context: Any) -> str:
    """Return a page for a browser from a template file."""
    from hlat.figures import interactive_figures  # drawing is slow to import
    from hlat.figures.report_figure import PALETTE_CSS

    environment = _open_templates(template.parent)
    environment.globals.update(interactive_figures=interactive_figures, palette_css=PALETTE_CSS)
    return redact_text(environment.get_template(template.name).render(context))


def render_text(template: Path, **context: Any) -> list[str]:
    """Return the lines of a text for a terminal from a template file."""
    templates = _open_templates(template.parent)
    return templates.get_template(template.name).render(context).rstrip("\n").split("\n")


@functools.cache
def _open_templates(directory: Path) -> Environment:
    """Return the environment of the templates in a directory and in that of this package."""
    environment = Environment(
        loader=FileSystemLoader([directory, Path(__file__).with_name("templates")]),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment
