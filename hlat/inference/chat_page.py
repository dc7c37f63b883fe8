"""The chat page: one file with its style and script, which may connect to its own server only."""

import base64
import hashlib
from pathlib import Path

from hlat.figures.page_templates import render_page
from hlat.inference.sampling_settings import SamplingSettings

_DIRECTORY = Path(__file__).parent
_SCRIPT = (_DIRECTORY / "chat_page.js").read_text(encoding="utf-8")
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_DIGEST}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render_chat_page(model: str, has_chat_template: bool) -> str:
    """Return the page for a model that answers messages, or only continues text."""
    return render_page(
        _DIRECTORY / "templates/chat_page.html.j2",
        model=model,
        has_chat_template=has_chat_template,
        settings=SamplingSettings(),
        script=_SCRIPT,
    )
