"""Encoded held-out text in the cache directory: all runs of a study encode the same text."""

import hashlib
import io
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hlat.data.data_cache import get_cache_dir, replace_file

FORMAT_VERSION = 1
"""To increase when the tokens or source bytes of a document change."""


def compute_cache_path(documents: Iterable[str], tokenizer_key: str) -> Path:
    """Return the path of the encoded documents of a tokenizer."""
    digest = hashlib.blake2b(f"{FORMAT_VERSION} {tokenizer_key}".encode(), digest_size=16)
    for document in documents:
        content = document.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return get_cache_dir() / "heldout" / f"{digest.hexdigest()}.npz"


def load_arrays(path: Path) -> dict[str, NDArray[np.generic]] | None:
    """Return the arrays of a file by name, or None if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def save_arrays(path: Path, arrays: dict[str, NDArray[np.generic]]) -> None:
    """Write arrays to a file, or write nothing if the cache directory is not writable."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, buffer.getvalue())
