"""The embedded corpus: the standard library's documents as Arrow files in a cache folder.

The first run on a machine must work without a download or a flag, and exercise the same path as a
corpus of terabytes. So the library becomes Arrow files once, which are then sources like any other.
"""

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from hlat.config.errors import ConfigError
from hlat.data import library

FORMAT = 1
"""Part of the folder's name; raised when the preparation gives other documents."""
ROWS_PER_BATCH = 1024


def cache_folder() -> Path:
    """Folder for what hlat can make again: $HLAT_CACHE, $XDG_CACHE_HOME/hlat or ~/.cache/hlat."""
    if chosen := os.environ.get("HLAT_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "hlat"
    return Path.home() / ".cache" / "hlat"


def corpus_folder() -> Path:
    """Where the embedded corpus of this Python version lies, or will lie once it is prepared."""
    return cache_folder() / f"python-library-{platform.python_version()}-{FORMAT}"


def source_file(key: str, name: str) -> Path:
    """The Arrow file of an embedded source, prepared on first use.

    Args:
        key: Config key that asks for it, for messages.
        name: `code`, `data` or `prose`.

    Raises:
        ConfigError: If there is no such source, or it cannot be prepared.
    """
    if name not in library.NAMES:
        known = ", ".join(f"embedded:{known}" for known in library.NAMES)
        raise ConfigError(f"{key}: there is no embedded:{name}; use one of {known}")
    return prepare() / f"{name}.arrow"


def prepare() -> Path:
    """Write the embedded corpus unless it is there, and return its folder.

    It appears whole or not at all, and of several processes that prepare it at once one wins.

    Raises:
        ConfigError: If the library has no sources, or the cache folder cannot be written.
    """
    folder = corpus_folder()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as temporary:
            staged = Path(temporary) / folder.name
            staged.mkdir()
            _write(staged, folder)
            _publish(staged, folder)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare the embedded corpus in {folder} ({error.strerror or error}); set the "
            "environment variable HLAT_CACHE to a folder with 50 MB of free space"
        ) from error
    return folder


def _publish(staged: Path, folder: Path) -> None:
    """Move a finished folder into place; a folder that another process moved there first stays."""
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _write(staged: Path, folder: Path) -> None:
    documents = _collect(folder)
    missing = [name for name in library.NAMES if not documents[name]]
    if missing:
        raise ConfigError(
            "the embedded corpus is made from the sources of Python's standard library, and this "
            f"Python's has none for {', '.join(missing)}; set data= to a corpus of your own"
        )
    for name, found in documents.items():
        _write_source(staged / f"{name}.arrow", found)


def _collect(folder: Path) -> dict[str, list[library.Document]]:
    """The library's documents by source: each text once, and no empty one."""
    root = Path(sysconfig.get_path("stdlib"))
    label = f"preparing the embedded corpus in {folder}"
    interactive = sys.stderr.isatty()
    if not interactive:
        print(f"{label} ...", file=sys.stderr, flush=True)
    documents: dict[str, list[library.Document]] = {name: [] for name in library.NAMES}
    seen: set[str] = set()
    for path in tqdm(library.list_files(root), label, unit="file", disable=not interactive):
        for document in library.read_documents(root, path):
            if document.text.strip() and document.text not in seen:
                seen.add(document.text)
                documents[document.name].append(document)
    return documents


def _write_source(path: Path, documents: list[library.Document]) -> None:
    table = pa.table(
        {
            "text": [document.text for document in documents],
            "source": [document.origin for document in documents],
        }
    )
    with path.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=ROWS_PER_BATCH)
        file.flush()
        os.fsync(file.fileno())
