"""Test files of fsspec stores, and errors that contain the URL."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations, register_implementation

from hlat.config.config_errors import ConfigError
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.source_files import find_source_files


@pytest.fixture
def store_url(tmp_path: Path, write_arrow) -> str:
    """Write three files to a directory of a store and return its URL."""
    url = f"memory://{uuid.uuid4()}"
    filesystem = MemoryFileSystem()
    for name in ("b.arrow", "a.arrow", "notes.txt"):
        path = write_arrow(tmp_path / name, [f"{name} {i}" for i in range(9)])
        filesystem.pipe(f"{url}/{name}", path.read_bytes())
    return url


def find_names(url: str, root: str = "/nowhere") -> list[str]:
    return [file.name for file in find_source_files("data.sources.a.paths", root, [url])]


def test_directories_globs_and_files(store_url: str) -> None:
    assert (
        find_names(store_url)
        == find_names(f"{store_url}/")
        == find_names(f"{store_url}/*.arrow")
        == ["a.arrow", "b.arrow"]
    )
    assert (
        find_names(f"{store_url}/b.arrow") == find_names("b.arrow", root=store_url) == ["b.arrow"]
    )


def test_local_file_by_url(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "x" / "a.arrow", ["x"])
    for url in (f"file://{path}", f"local://{path}", f"file://{path.parent}"):
        (file,) = find_source_files("key", "/nowhere", [url])
        assert (file.num_bytes, file.is_remote) == (path.stat().st_size, True)
        assert str(path.stat().st_mtime) in file.version


def test_documents_are_read_from_a_store(store_url: str) -> None:
    corpus = ArrowDataset(find_source_files("key", "/", [store_url]), "text")
    texts = [corpus.read_text(row) for row in range(len(corpus))]
    assert texts == [f"{name} {i}" for name in ("a.arrow", "b.arrow") for i in range(9)]


@pytest.mark.parametrize("pattern", ["no.arrow", "*.parquet", "no/"])
def test_a_url_without_files_is_an_error(store_url: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=f"no file matches '{store_url}/"):
        find_names(f"{store_url}/{pattern}")


def test_manifests_of_a_store_are_validated(store_url: str) -> None:
    content = json.dumps({"files": [{"name": "c.arrow", "bytes": 3}]}).encode()
    MemoryFileSystem().pipe(f"{store_url}/manifest.json", content)
    with pytest.raises(ConfigError, match=f"{store_url}/c.arrow is missing as manifest.json"):
        find_names(store_url)


def test_an_unknown_protocol_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        find_names("carrier-pigeon://coop/1.arrow")
    assert str(error.value).startswith(
        "data.sources.a.paths: carrier-pigeon://coop/1.arrow: carrier-pigeon is not an allowed "
        "protocol; use file, "
    )


def test_missing_driver_is_an_error_with_its_package(monkeypatch) -> None:
    missing = {"class": "no_such_package.Store", "err": "Install s3fs to access S3"}
    monkeypatch.setitem(known_implementations, "closet", missing)
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "closet")
    with pytest.raises(ConfigError) as error:
        find_names("closet://b/*.arrow")
    assert str(error.value) == (
        "data.sources.a.paths: closet://b/*.arrow needs a package that is not installed "
        "(Install s3fs to access S3); pip install it beside hlat"
    )


class UnreadableStore(MemoryFileSystem):
    """Store that lists its files but cannot open them."""

    protocol = ("closed",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("closed://", "memory://"))

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        raise KeyError("token expired")


def test_unreadable_store_is_an_error(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "closed")
    register_implementation("closed", UnreadableStore, clobber=True)
    url = store_url.replace("memory", "closed")
    files = find_source_files("key", "/", [url])
    with pytest.raises(
        ConfigError, match=r"closed:.*/a\.arrow cannot be used \(KeyError: 'token exp"
    ):
        ArrowDataset(files, "text")
    MemoryFileSystem().pipe(f"{store_url}/manifest.json", b"{}")
    with pytest.raises(
        ConfigError, match=r"closed:.*/manifest\.json cannot be used \(KeyError: 'tok"
    ):
        find_names(url)
