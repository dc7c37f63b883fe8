"""Engines, planner, checkpoint store and doctor query specifications, and name no optimizer."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
OPTIMIZER_NAMES = re.compile(r"exp_avg|adamw", re.IGNORECASE)
EXEMPT = {
    "hlat/config/optimizer.py": "the schema of the config group, with the registered optimizers",
    "hlat/doctor/reference_optimizer.py": "an independent implementation, selected by name",
}
"""Files outside of hlat/optim that name an optimizer, and their content."""


def _list_names(source: str) -> Iterator[str]:
    """Yield identifiers, and strings other than docstrings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value
        elif isinstance(node, ast.alias):
            yield f"{node.name} {node.asname or ''}"
        else:
            names = ("id", "attr", "name", "arg", "module")
            yield from (
                value for name in names if isinstance(value := getattr(node, name, None), str)
            )


def test_names_are_found() -> None:
    for source in (
        "exp_avg = 1",
        "x.AdamW",
        "x['exp_avg_sq']",
        "def f(*, adamw): ...",
        "f(adamw=1)",
    ):
        assert any(map(OPTIMIZER_NAMES.search, _list_names(source))), source
    for source in ("import a.adamw", "from a import AdamW as B", "from adamw import b"):
        assert any(map(OPTIMIZER_NAMES.search, _list_names(source))), source
    assert not any(map(OPTIMIZER_NAMES.search, _list_names('"""Of AdamW."""\nx = "momentum"')))


def test_only_components_name_optimizers() -> None:
    found = {}
    for folder in ("hlat", "launchers"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            name = file.relative_to(REPOSITORY).as_posix()
            if not name.startswith("hlat/optim/") and name not in EXEMPT:
                names = [*filter(OPTIMIZER_NAMES.search, _list_names(file.read_text()))]
                found |= {name: names} if names else {}
    assert not found, found


def test_exempt_files_name_optimizers() -> None:
    for name in EXEMPT:
        assert any(map(OPTIMIZER_NAMES.search, _list_names((REPOSITORY / name).read_text()))), name


def test_the_reference_is_independent() -> None:
    source = (REPOSITORY / "hlat/doctor/reference_optimizer.py").read_text()
    modules = [
        node.module or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
    ]
    assert not [module for module in modules if module.startswith(("hlat.optim", "torch"))]
    assert "import torch" not in source
