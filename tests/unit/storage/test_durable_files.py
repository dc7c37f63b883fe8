"""Durable writes: contents, hashes, and the order of fsync calls."""

import hashlib
import os
from pathlib import Path

import pytest

from hlat.storage import durable_files


def test_record_equals_the_hash_of_the_file(tmp_path: Path) -> None:
    content = os.urandom(3_000_001)
    record = durable_files.write_file(tmp_path / "f", [content[:5], memoryview(content)[5:], b""])
    assert (tmp_path / "f").read_bytes() == content
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    assert durable_files.hash_file(tmp_path / "f") == record


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    durable_files.write_file(tmp_path / "f", [b"old"])
    with pytest.raises(FileExistsError):
        durable_files.write_file(tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old"


def test_files_and_directories_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(_path_of(number)))
    durable_files.make_directory(tmp_path / "a" / "b")
    durable_files.write_file(tmp_path / "a" / "b" / "f", [b"x"])
    durable_files.rename_durably(tmp_path / "a" / "b", tmp_path / "a" / "c")
    expected = [tmp_path, tmp_path / "a", tmp_path / "a" / "b" / "f", tmp_path / "a"]
    assert flushed == [str(path) for path in expected]


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
