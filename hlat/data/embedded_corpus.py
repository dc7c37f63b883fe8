"""The embedded corpus: Python's standard library as Arrow files in the cache directory.

The first run on a machine works without a download or an option and uses the same code as a corpus
of terabytes. The library provides three sources that differ as those of a real corpus do: program
code, the prose of its docstrings and documentation, and the data of its tests and tables.
Docstrings are removed from the code, so no text belongs to two sources.
"""

import ast
import inspect
import os
import platform
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pyarrow as pa

from hlat.config.config_errors import ConfigError
from hlat.data.data_cache import get_cache_dir, open_progress_bar

FORMAT_VERSION = 1
"""Part of the directory's name; incremented when the documents change."""
ROWS_PER_BATCH = 1024
SOURCE_NAMES = ("code", "data", "prose")
TARGET_DATA_BYTES = 12 << 20
"""Approximate size of the sample of test suites and tables, which outweigh the other files."""

_TOPICS_FILE = "pydoc_data/topics.py"
_DATA_DIRS = frozenset({"test", "tests", "idle_test", "encodings"})
_EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_SUFFIXES = frozenset({".py", ".txt", ".rst"})
_DOCSTRING_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class LibraryDocument(NamedTuple):
    """A text with its source and its path in the library."""

    source: str
    path: str
    text: str


def get_embedded_corpus_dir() -> Path:
    """Return the directory of the embedded corpus of this Python version, which may not exist."""
    return get_cache_dir() / f"python-library-{platform.python_version()}-{FORMAT_VERSION}"


def get_embedded_source_file(config_key: str, name: str) -> Path:
    """Return the Arrow file of an embedded source, preparing the corpus on first use.

    Raises:
        ConfigError: If the source is unknown, or the corpus cannot be prepared.
    """
    if name not in SOURCE_NAMES:
        known = ", ".join(f"embedded:{known}" for known in SOURCE_NAMES)
        raise ConfigError(f"{config_key}: there is no embedded:{name}; use one of {known}")
    return prepare_embedded_corpus() / f"{name}.arrow"


def prepare_embedded_corpus() -> Path:
    """Write the embedded corpus unless it exists, and return its directory.

    The directory is moved into place when complete, so concurrent processes do not interfere.

    Raises:
        ConfigError: If the library has no sources, or the cache directory is not writable.
    """
    directory = get_embedded_corpus_dir()
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=directory.parent) as temporary:
            staged_dir = Path(temporary) / directory.name
            staged_dir.mkdir()
            _write_corpus(staged_dir, directory)
            _publish_directory(staged_dir, directory)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare the embedded corpus in {directory} ({error.strerror or error}); set "
            "the environment variable HLAT_CACHE to a folder with 50 MB of free space"
        ) from error
    return directory


def _publish_directory(staged_dir: Path, target_dir: Path) -> None:
    """Move a complete directory into place unless another process did."""
    try:
        staged_dir.rename(target_dir)
    except OSError:
        if not target_dir.is_dir():
            raise


def _write_corpus(staged_dir: Path, target_dir: Path) -> None:
    documents = _collect_documents(target_dir)
    missing = [name for name in SOURCE_NAMES if not documents[name]]
    if missing:
        raise ConfigError(
            "the embedded corpus is made from the sources of Python's standard library, and this "
            f"Python's has none for {', '.join(missing)}; set data= to a corpus of your own"
        )
    for name, source_documents in documents.items():
        texts = [document.text for document in source_documents]
        paths = [document.path for document in source_documents]
        table = pa.table({"text": texts, "source": paths})
        with (staged_dir / f"{name}.arrow").open("wb") as file:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=ROWS_PER_BATCH)
            file.flush()
            os.fsync(file.fileno())


def _collect_documents(target_dir: Path) -> dict[str, list[LibraryDocument]]:
    """Return the distinct, non-empty documents of the library by source."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, list[LibraryDocument]] = {name: [] for name in SOURCE_NAMES}
    seen: set[str] = set()
    label = f"preparing the embedded corpus in {target_dir}"
    paths = list_library_files(root)
    for path in open_progress_bar(label, iterable=paths, unit="file"):
        for document in read_library_documents(root, path):
            if document.text.strip() and document.text not in seen:
                seen.add(document.text)
                documents[document.source].append(document)
    return documents


def list_library_files(root: Path) -> list[str]:
    """Return the sorted paths of the library's documents, relative to its root.

    Of the tests and tables every k-th file is listed, with k such that their total size is about
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
