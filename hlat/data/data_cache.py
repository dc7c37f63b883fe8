"""The cache directory: files that hlat can recreate, and the progress of their preparation."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm


def get_cache_dir() -> Path:
    """Return $HLAT_CACHE, $XDG_CACHE_HOME/hlat or ~/.cache/hlat, for files hlat can recreate."""
    if cache_dir := os.environ.get("HLAT_CACHE"):
        return Path(cache_dir).expanduser()
    if xdg_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg_cache) / "hlat"
    return Path.home() / ".cache" / "hlat"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of an existing directory atomically.

    Raises:
        OSError: If it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=path.parent) as directory:
        temporary = Path(directory) / path.name
        temporary.write_bytes(content)
        os.replace(temporary, path)


def open_progress_bar(label: str, **settings: Any) -> "tqdm[Any]":
    """Open a progress bar with settings of tqdm; print one line if stderr is no terminal."""
    interactive = sys.stderr.isatty()
    if not interactive:
        print(f"{label} ...", file=sys.stderr, flush=True)
    return tqdm(desc=label, disable=not interactive, **settings)
