"""The documents that every Python installation carries: its standard library.

A first run should learn from real text without downloading any. The library holds three kinds that
differ as the sources of a real corpus do: program code, the prose that explains it, and the bulk of
its tests and tables. Docstrings are cut out of the code, so that no text stands in two sources.
"""

import ast
import inspect
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NAMES = ("code", "data", "prose")
DATA_BYTES = 12 << 20
"""About how much of the test suites and tables is kept: they outweigh the rest of the library."""

_TOPICS = "pydoc_data/topics.py"
_DATA_FOLDERS = frozenset({"test", "tests", "idle_test", "encodings"})
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_SUFFIXES = frozenset({".py", ".txt", ".rst"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Document:
    """A text, the source that it belongs to, and where in the library it was."""

    name: str
    origin: str
    text: str


def list_files(root: Path) -> list[str]:
    """Paths of the library's documents, relative to its root, sorted.

    Of the tests and tables every k-th file is listed, with the least k that keeps them near
    DATA_BYTES.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _NOT_LIBRARY and not name.startswith("config-")
        ]
        relative = PurePosixPath(Path(folder).relative_to(root).as_posix())
        found += [str(relative / name) for name in names if Path(name).suffix in _SUFFIXES]
    data = sorted(path for path in found if _is_data(path))
    rest = [path for path in found if not _is_data(path)]
    stride = -(-sum((root / path).stat().st_size for path in data) // DATA_BYTES)
    return sorted(rest + data[:: max(1, stride)])


def read_documents(root: Path, path: str) -> Iterator[Document]:
    """Yield the documents of one file: none where it is not UTF-8 or not Python of this version."""
    try:
        text = (root / path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    if _is_data(path):
        yield Document("data", path, text)
    elif not path.endswith(".py"):
        yield Document("prose", path, text)
    else:
        yield from _read_module(path, text)


def _is_data(path: str) -> bool:
    return not _DATA_FOLDERS.isdisjoint(PurePosixPath(path).parts[:-1])


def _read_module(path: str, text: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    if path == _TOPICS:
        yield from _read_topics(path, tree)
        return
    docstrings = _find_docstrings(tree)
    yield Document("code", path, _cut(text, docstrings))
    prose = [inspect.cleandoc(ast.literal_eval(statement.value)) for statement in docstrings]
    yield Document("prose", path, "\n\n".join(prose))


def _read_topics(path: str, tree: ast.Module) -> Iterator[Document]:
    """The chapters of the language reference that pydoc shows, a dict of strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node).items()):
                yield Document("prose", f"{path}:{topic}", text)


def _find_docstrings(tree: ast.Module) -> list[ast.Expr]:
    """The docstrings of a module and all it defines, in the order of the text."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            found.append(first)
    return sorted(found, key=lambda statement: statement.lineno)


def _cut(text: str, docstrings: list[ast.Expr]) -> str:
    """Remove docstrings and the lines that they leave blank; columns count UTF-8 bytes."""
    lines = text.encode().splitlines(keepends=True)
    for node in reversed(docstrings):
        assert node.end_lineno is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        rest = lines[first][: node.col_offset] + lines[last][node.end_col_offset :]
        lines[first : last + 1] = [rest] if rest.strip() else []
    return b"".join(lines).decode()
