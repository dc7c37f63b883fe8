"""Files of prompts, and of the generated texts as JSON lines."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hlat.config.config_errors import ConfigError
from hlat.storage.bounded_files import parse_json, read_bounded

_MAX_BYTES = 1 << 30
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

Row = dict[str, Any]
"""Line of a file: `prompt`, or `messages` of a chat, and any further fields."""


def load_prompts(path: Path) -> list[Row]:
    """Return the prompts of a file: of JSON lines by its suffix, otherwise one per line.

    Raise ConfigError if it cannot be read, contains no prompt, or a line is invalid.
    """
    try:
        lines = read_bounded(path, _MAX_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"prompts={path} cannot be read ({reason})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts={path} contains no prompt; write one per line")
    if path.suffix.lower() not in _JSON_SUFFIXES:
        return [{"prompt": line} for _, line in numbered]
    return [_parse_row(f"prompts={path}, line {number}", line) for number, line in numbered]


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[IO[str]]:
    """Open a new file, or standard output; raise ConfigError if the file exists."""
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"output={path} exists; use another file, or remove it") from error
    with file:
        yield file


def validate_messages(label: str, value: Any) -> list[dict[str, str]]:
    """Return the messages of a chat; raise ConfigError unless all have `role` and `content`."""
    is_valid = isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
    if not is_valid or not value:
        raise ConfigError(
            f'{label}: messages is a list of {{"role": "user", "content": "text"}} and the like'
        )
    return list(value)


def _parse_row(label: str, line: str) -> Row:
    try:
        row = parse_json(line.encode())
    except ValueError as error:
        raise ConfigError(f"{label} is not JSON ({error})") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f'{label}: give an object with either "prompt" or "messages"')
    if "messages" in row:
        validate_messages(label, row["messages"])
    elif not isinstance(row["prompt"], str):
        raise ConfigError(f"{label}: prompt is not a text")
    return row


def write_row(file: IO[str], row: Row) -> None:
    """Write a row as a line of JSON."""
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
