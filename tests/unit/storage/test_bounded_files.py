"""Test that reading a file of others is limited and never waits."""

import os
from pathlib import Path

import pytest

from hlat.storage.bounded_files import load_json, parse_json, read_bounded


def test_read_regular_files_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_bounded(path, 5) == read_bounded(tmp_path / "link") == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, more than the limit of 4"):
        read_bounded(path, 4)


def test_refuse_pipes_devices_and_endless_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/stdin")):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_bounded(path)
    with pytest.raises(OSError, match="Is a directory"):
        read_bounded(tmp_path)
    with pytest.raises(OSError, match="more than the limit of 3"):
        read_bounded(Path("/proc/self/status"), 3)  # reports a size of 0


def test_refuse_invalid_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, reason in {
        b"[" * 100_000: "nested too deeply",
        b"1e400": "1e400 is not a finite number",
        b"[NaN]": "NaN is not",
        b"-Infinity": "-Infinity is not",
        b'{"a": -1e999}': "-1e999 is not",
        b"\xff": "can't decode",
        b"": "Expecting value",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            load_json(path)
    assert parse_json(b'{"a": [1, -2.5e3, null]}') == {"a": [1, -2500.0, None]}
