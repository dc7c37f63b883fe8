"""docs/neuron.md contains the table of engine capabilities; `--update` rewrites it."""

import re
from pathlib import Path

import pytest

from hlat.config.engine_capabilities import format_capabilities_table

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs/neuron.md"
BEGIN, END = "<!-- engine capabilities: begin -->", "<!-- engine capabilities: end -->"


def test_document_contains_the_table(pytestconfig: pytest.Config) -> None:
    table = f"{BEGIN}\n\n{format_capabilities_table()}\n{END}"
    text = DOCUMENT.read_text()
    if pytestconfig.getoption("--update"):
        text = re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL)
        DOCUMENT.write_text(text)
    assert table in text, "the capabilities changed: pytest tests/golden --update"
