"""The embedded corpus: Python's standard library as Arrow files in the cache directory.

The first run on a machine works without a download or an option and uses the same code as a corpus
of terabytes. The library is converted to Arrow files once; they are sources like any other.
"""

import os
import platform
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa

from hlat.config.config_errors import ConfigError
from hlat.data import standard_library
from hlat.data.data_cache import get_cache_dir, open_progress_bar

FORMAT_VERSION = 1
"""Part of the directory's name; incremented when the documents change."""
ROWS_PER_BATCH = 1024


def get_embedded_corpus_dir() -> Path:
    """Return the directory of the embedded corpus of this Python version, which may not exist."""
    return get_cache_dir() / f"python-library-{platform.python_version()}-{FORMAT_VERSION}"


def get_embedded_source_file(config_key: str, name: str) -> Path:
    """Return the Arrow file of an embedded source, preparing the corpus on first use.

    Raises:
        ConfigError: If the source is unknown, or the corpus cannot be prepared.
    """
    if name not in standard_library.SOURCE_NAMES:
        known = ", ".join(f"embedded:{known}" for known in standard_library.SOURCE_NAMES)
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
    missing = [name for name in standard_library.SOURCE_NAMES if not documents[name]]
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


def _collect_documents(target_dir: Path) -> dict[str, list[standard_library.LibraryDocument]]:
    """Return the distinct, non-empty documents of the library by source."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, list[standard_library.LibraryDocument]]
    documents = {name: [] for name in standard_library.SOURCE_NAMES}
    seen: set[str] = set()
    label = f"preparing the embedded corpus in {target_dir}"
    paths = standard_library.list_library_files(root)
    for path in open_progress_bar(label, iterable=paths, unit="file"):
        for document in standard_library.read_library_documents(root, path):
            if document.text.strip() and document.text not in seen:
                seen.add(document.text)
                documents[document.source].append(document)
    return documents
