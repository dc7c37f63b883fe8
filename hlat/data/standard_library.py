"""Documents of Python's standard library, the text of the embedded corpus.

The library provides three sources that differ as those of a real corpus do: program code, the prose
of its docstrings and documentation, and the data of its tests and tables. Docstrings are removed
from the code, so no text belongs to two sources.
"""

import ast
import inspect
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SOURCE_NAMES = ("code", "data", "prose")
TARGET_DATA_BYTES = 12 << 20
"""Approximate size of the sample of test suites and tables, which outweigh the other files."""

_TOPICS_FILE = "pydoc_data/topics.py"
_DATA_DIRS = frozenset({"test", "tests", "idle_test", "encodings"})
_EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_SUFFIXES = frozenset({".py", ".txt", ".rst"})
_DOCSTRING_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class LibraryDocument:
    """A text with its source and its path in the library."""

    source: str
    path: str
    text: str


def list_library_files(root: Path) -> list[str]:
    """Return the sorted paths of the library's documents, relative to its root.

    Of the tests and tables every k-th file is listed, with the smallest k whose total size is about
    TARGET_DATA_BYTES.
    """
    paths = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in _EXCLUDED_DIRS and not name.startswith("config-")
        ]
        relative = PurePosixPath(Path(directory).relative_to(root).as_posix())
        paths += [str(relative / name) for name in names if Path(name).suffix in _SUFFIXES]
    data = sorted(path for path in paths if _is_data_file(path))
    rest = [path for path in paths if not _is_data_file(path)]
    stride = -(-sum((root / path).stat().st_size for path in data) // TARGET_DATA_BYTES)
    return sorted(rest + data[:: max(1, stride)])


def read_library_documents(root: Path, path: str) -> Iterator[LibraryDocument]:
    """Yield the documents of one file; skip a file of another encoding or Python version."""
    try:
        text = (root / path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    if _is_data_file(path):
        yield LibraryDocument("data", path, text)
    elif not path.endswith(".py"):
        yield LibraryDocument("prose", path, text)
    else:
        yield from _read_module(path, text)


def _is_data_file(path: str) -> bool:
    return not _DATA_DIRS.isdisjoint(PurePosixPath(path).parts[:-1])


def _read_module(path: str, text: str) -> Iterator[LibraryDocument]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    if path == _TOPICS_FILE:
        yield from _read_topics(path, tree)
        return
    docstrings = _find_docstrings(tree)
    yield LibraryDocument("code", path, _remove_docstrings(text, docstrings))
    prose = [inspect.cleandoc(ast.literal_eval(statement.value)) for statement in docstrings]
    yield LibraryDocument("prose", path, "\n\n".join(prose))


def _read_topics(path: str, tree: ast.Module) -> Iterator[LibraryDocument]:
    """Yield the chapters of the language reference in pydoc, a dict of strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node).items()):
                yield LibraryDocument("prose", f"{path}:{topic}", text)


def _find_docstrings(tree: ast.Module) -> list[ast.Expr]:
    """Return the docstrings of a module and its definitions in source order."""
    docstrings = []
    for node in ast.walk(tree):
        if isinstance(node, _DOCSTRING_NODES) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            docstrings.append(first)
    return sorted(docstrings, key=lambda statement: statement.lineno)


def _remove_docstrings(text: str, docstrings: list[ast.Expr]) -> str:
    """Remove docstrings and lines that become blank; ast columns count UTF-8 bytes."""
    lines = text.encode().splitlines(keepends=True)
    for node in reversed(docstrings):
        assert node.end_lineno is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        rest = lines[first][: node.col_offset] + lines[last][node.end_col_offset :]
        lines[first : last + 1] = [rest] if rest.strip() else []
    return b"".join(lines).decode()
