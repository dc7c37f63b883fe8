"""Identity of data files: location, size, version and cache keys."""

import os
from pathlib import Path

import pytest

from hlat.storage.data_file import DataDirectory, DataFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.arrow"
    path.write_bytes(b"12345")
    os.utime(path, ns=(5, 7))
    return path


def test_local_file(path: Path) -> None:
    file = DataFile.from_path(path)
    assert (file.location, file.num_bytes, file.version) == (str(path), 5, "7")
    assert (file.name, file.is_remote) == ("a.arrow", False)


def test_link_has_the_cache_key_of_its_target(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    one, two = DataFile.from_path(path), DataFile.from_path(link)
    assert one != two
    assert one.resolved_location == two.resolved_location == str(path)
    assert one.compute_cache_key("text", 1) == two.compute_cache_key("text", 1)


def test_cache_key_depends_on_file_and_settings(path: Path) -> None:
    file = DataFile.from_path(path)
    store = DataFile("s3://b/a.arrow", 5, "7")
    digests = [
        file.compute_cache_key("text", 1),
        file.compute_cache_key("body", 1),
        file.compute_cache_key("text", 2),
    ]
    digests += [
        store.compute_cache_key("text", 1),
        DataFile(str(path), 6, "7").compute_cache_key("text", 1),
    ]
    os.utime(path, ns=(5, 8))
    digests += [DataFile.from_path(path).compute_cache_key("text", 1)]
    assert len(set(digests)) == 6
    assert (store.name, store.is_remote, store.resolved_location) == (
        "a.arrow",
        True,
        "s3://b/a.arrow",
    )


def test_missing_or_invalid_json_is_none(path: Path) -> None:
    contents = {"good": b"[1]", "bad": b"{"}
    files = {name: DataFile(name, 1, "") for name in contents}
    folder = DataDirectory("x", files, contents.__getitem__)
    assert [folder.read_json(name) for name in ("good", "bad", "none")] == [[1], None, None]
