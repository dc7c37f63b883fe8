"""Whatever fsspec reaches is listed as a local folder is, and its failures name the URL."""

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
def store(tmp_path: Path, write_arrow) -> str:
    """URL of a folder of a store with three files."""
    url = f"memory://{uuid.uuid4()}"
    filesystem = MemoryFileSystem()
    for name in ("b.arrow", "a.arrow", "notes.txt"):
        path = write_arrow(tmp_path / name, [f"{name} {i}" for i in range(9)])
        filesystem.pipe(f"{url}/{name}", path.read_bytes())
    return url


def found(url: str, root: str = "/nowhere") -> list[str]:
    return [file.name for file in find_source_files("data.sources.a.paths", root, [url])]


def test_folders_globs_and_files(store: str) -> None:
    assert found(store) == found(f"{store}/") == found(f"{store}/*.arrow") == ["a.arrow", "b.arrow"]
    assert found(f"{store}/b.arrow") == found("b.arrow", root=store) == ["b.arrow"]


def test_a_file_of_this_machine_by_url(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "x" / "a.arrow", ["x"])
    for url in (f"file://{path}", f"local://{path}", f"file://{path.parent}"):
        (file,) = find_source_files("key", "/nowhere", [url])
        assert (file.num_bytes, file.is_remote) == (path.stat().st_size, True)
        assert str(path.stat().st_mtime) in file.version


def test_documents_of_a_store_are_those_of_its_files(store: str) -> None:
    corpus = ArrowDataset(find_source_files("key", "/", [store]), "text")
    texts = [corpus.read_text(row) for row in range(len(corpus))]
    assert texts == [f"{name} {i}" for name in ("a.arrow", "b.arrow") for i in range(9)]


@pytest.mark.parametrize("pattern", ["no.arrow", "*.parquet", "no/"])
def test_a_url_without_files_is_an_error(store: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=f"no file matches '{store}/"):
        found(f"{store}/{pattern}")


def test_a_folder_of_a_store_is_refused_as_one_here_is(store: str) -> None:
    content = json.dumps({"files": [{"name": "c.arrow", "bytes": 3}]}).encode()
    MemoryFileSystem().pipe(f"{store}/manifest.json", content)
    with pytest.raises(ConfigError, match=f"{store}/c.arrow is missing as manifest.json"):
        found(store)


def test_an_unknown_protocol_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        found("carrier-pigeon://coop/1.arrow")
    assert str(error.value).startswith(
        "data.sources.a.paths: carrier-pigeon://coop/1.arrow: carrier-pigeon is not an allowed "
        "protocol; use file, "
    )


def test_a_missing_driver_is_named(monkeypatch) -> None:
    missing = {"class": "no_such_package.Store", "err": "Install s3fs to access S3"}
    monkeypatch.setitem(known_implementations, "closet", missing)
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "closet")
    with pytest.raises(ConfigError) as error:
        found("closet://b/*.arrow")
    assert str(error.value) == (
        "data.sources.a.paths: closet://b/*.arrow needs a package that is not installed "
        "(Install s3fs to access S3); pip install it beside hlat"
    )


class ClosedStore(MemoryFileSystem):
    """A store that lists its files and gives none of them."""

    protocol = ("closed",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("closed://", "memory://"))

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        raise KeyError("token expired")


def test_a_store_that_gives_nothing_is_an_error(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "closed")
    register_implementation("closed", ClosedStore, clobber=True)
    url = store.replace("memory", "closed")
    files = find_source_files("key", "/", [url])
    with pytest.raises(
        ConfigError, match=r"closed:.*/a\.arrow cannot be used \(KeyError: 'token exp"
    ):
        ArrowDataset(files, "text")
    MemoryFileSystem().pipe(f"{store}/manifest.json", b"{}")
    with pytest.raises(
        ConfigError, match=r"closed:.*/manifest\.json cannot be used \(KeyError: 'tok"
    ):
        found(url)
