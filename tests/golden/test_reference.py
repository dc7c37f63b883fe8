"""docs/configuration.md lists every key with the docstring of its field; `--update` rewrites the list."""

import ast
import dataclasses
import itertools
import re
import typing
from pathlib import Path

import pytest

from hlat.config.run import Config

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCUMENT = REPOSITORY / "docs/configuration.md"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def _docstrings(schema: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    module = REPOSITORY / f"{schema.__module__.replace('.', '/')}.py"
    tree = ast.parse(module.read_text())
    body = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == schema.__name__
    ).body
    return {
        ast.unparse(field.target): " ".join(str(told.value.value).split())
        for field, told in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(told, ast.Expr)
        and isinstance(told.value, ast.Constant)
    }


def _table(group: str, schema: type) -> str:
    choices = sorted(file.stem for file in (REPOSITORY / "conf" / group).glob("*.yaml"))
    heading = f"### {group}\n\n" + (
        f"Choices: {', '.join(f'`{c}`' for c in choices)}\n\n" if choices else ""
    )
    rows = [
        f"| `{group}.{name}` | {text.replace('|', chr(92) + '|')} |"
        for name, text in _docstrings(schema).items()
    ]
    return heading + "| key | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def test_the_list_of_keys_is_the_schema(pytestconfig: pytest.Config) -> None:
    types = typing.get_type_hints(Config)
    tables = "\n".join(
        _table(field.name, types[field.name]) for field in dataclasses.fields(Config)
    )
    now = f"{BEGIN}\n\n{tables}\n{END}"
    text = DOCUMENT.read_text()
    if pytestconfig.getoption("--update"):
        text = re.sub(f"{BEGIN}.*{END}", lambda _: now, text, flags=re.DOTALL)
        DOCUMENT.write_text(text)
    assert now in text, "the schema changed: pytest tests/golden --update"
