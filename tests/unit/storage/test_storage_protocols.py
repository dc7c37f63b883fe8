"""Protocols of URLs in files of others."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from hlat.checkpoint import checkpoint_directory
from hlat.config.config_errors import ConfigError
from hlat.data.source_files import find_source_files
from hlat.prepare.input_files import InputReader, find_input_files
from hlat.storage.storage_protocols import open_filesystem

REFUSED = [
    "reference://::data:application/json,{}",
    "reference://x",
    "reference::data:application/json,{}",
    "simplecache::https://127.0.0.1/x",
    "dask://x",
    "github://a:b@main/x",
    "data:text/plain,x",
    "zip://x::file:///etc/passwd",
    "ssh://host/x",
]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the protocols of constructed file systems."""
    protocols: list[str] = []
    original = fsspec.spec._Cached.__call__

    def construct(cls: type, *args: object, **kwargs: object) -> object:
        protocols.append(str(vars(cls).get("protocol")))
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(fsspec.spec._Cached, "__call__", construct)
    return protocols


@pytest.mark.parametrize("url", REFUSED)
def test_refuse_before_a_file_system_is_constructed(url: str, opened: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"not allowed|not an allowed protocol"):
        open_filesystem(url)
    assert opened == []


def _load_checkpoint_root(url: str, run_dir: Path) -> None:
    (run_dir / checkpoint_directory.DESTINATION_FILE).write_text(url)
    checkpoint_directory.load_checkpoint_root(run_dir)


READERS: dict[str, Callable[[str, Path], object]] = {
    "checkpoints_are_in.txt": _load_checkpoint_root,
    "data.sources": lambda url, root: find_source_files("data.sources.x.paths", str(root), [url]),
    "prepare": lambda url, root: find_input_files([url]),
    "prepare, one file": lambda url, root: InputReader(url),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_urls_refuses_them(reader: str, opened: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reference://::data"):
        READERS[reader](REFUSED[0], tmp_path)
    assert opened == []


def test_allow_object_stores_and_protocols_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert open_filesystem(f"file://{tmp_path}")[1] == str(tmp_path)
    assert open_filesystem(str(tmp_path))[1] == str(tmp_path)
    assert open_filesystem("memory://a/b")[1] == "/a/b"
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "data")
    assert open_filesystem("data:,x")[0].protocol == "data"
