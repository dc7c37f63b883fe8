"""Reading of small files of others: limited in size, never from a pipe or device, strict JSON.

A file from elsewhere can be a device without an end, a pipe that blocks, larger than the memory, or
JSON with values that Python accepts and JSON does not have.
"""

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 32 << 20
"""Limit of JSON files. Parsing needs up to 25 times as much memory (nested empty lists)."""

_SHOWN_CHARACTERS = 60


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: If the file cannot be read, is a pipe or device, or is larger.
    """
    # Opening a pipe would wait for a writer without O_NONBLOCK
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            is_directory = stat.S_ISDIR(status.st_mode)
            reason = os.strerror(errno.EISDIR) if is_directory else "it is not a regular file"
            raise OSError(errno.EINVAL, reason, str(path))
        validate_size(path, status.st_size, max_bytes)
        content = file.read(max_bytes + 1)  # files of /proc have more bytes than they report
        validate_size(path, len(content), max_bytes)
        return content


def validate_size(path: object, num_bytes: int, max_bytes: int = MAX_JSON_BYTES) -> None:
    """Raise OSError if a file of `num_bytes` bytes is larger than `max_bytes`."""
    if num_bytes > max_bytes:
        reason = f"it has {num_bytes:,} bytes, more than the limit of {max_bytes:,}"
        raise OSError(errno.EFBIG, reason, str(path))


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: If the document is not JSON, is nested too deeply, or contains a number that is
            not finite, such as NaN or 1e400.
    """
    try:
        return json.loads(content, parse_float=_parse_float, parse_constant=_parse_float)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def load_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: If the file cannot be read, is a pipe or device, or is larger than `max_bytes`.
        ValueError: If the file is not JSON, as for `parse_json`.
    """
    return parse_json(read_bounded(path, max_bytes))


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]} is not a finite number")
    return value
