"""The chat page: one file with its style and script, which may connect to its own server only."""

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from hlat.inference.sampling_settings import SamplingSettings
from hlat.report import report_templates

_DIRECTORY = Path(__file__).parent
_SCRIPT = (_DIRECTORY / "chat_page.js").read_text(encoding="utf-8")
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_DIGEST}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render_chat_page(model: str, has_chat_template: bool) -> str:
    """Return the page for a model that answers messages, or only continues text."""
    from hlat.report.figures import PALETTE_CSS  # slow to import

    templates = [_DIRECTORY, Path(report_templates.__file__).with_name("templates")]
    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("chat_page.html.j2").render(
        model=model,
        has_chat_template=has_chat_template,
        settings=SamplingSettings(),
        palette_css=PALETTE_CSS,
        script=_SCRIPT,
    )
