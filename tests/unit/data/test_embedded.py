"""The embedded corpus appears whole or not at all, wherever the user wants it."""

import threading
from pathlib import Path

import pytest

from hlat.config.batch import Batch
from hlat.config.data import Data, Source
from hlat.config.errors import ConfigError
from hlat.config.phase import Phase, Stage
from hlat.data import embedded, library
from hlat.data.corpus import Corpus
from hlat.data.files import find_files
from hlat.data.loader import open_loader


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch) -> Path:
    """A library of three files in place of the real one, and a cache of its own."""
    root = tmp_path / "library"
    (root / "test").mkdir(parents=True)
    (root / "a.py").write_text('"""Prose."""\nx = 1\n')
    (root / "b.py").write_text("x = 1\n")
    (root / "test" / "c.py").write_text("y = 2\n")
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return root


def read(name: str) -> list[str]:
    corpus = Corpus([embedded.source_file("key", name)], "text")
    return [corpus.text(row) for row in range(len(corpus))]


def test_the_cache_folder_is_where_the_environment_says(monkeypatch) -> None:
    monkeypatch.setenv("HLAT_CACHE", "/x/y")
    monkeypatch.setenv("XDG_CACHE_HOME", "/z")
    monkeypatch.setenv("HOME", "/h")
    assert embedded.cache_folder() == Path("/x/y")
    monkeypatch.delenv("HLAT_CACHE")
    assert embedded.cache_folder() == Path("/z/hlat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_folder() == Path("/h/.cache/hlat")


def test_sources_are_prepared_once_and_said_so(small_library: Path, capsys) -> None:
    assert read("code") == ["x = 1\n"]  # b.py repeats a.py and is taken once
    assert read("prose") == ["Prose."]
    assert read("data") == ["y = 2\n"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"preparing the embedded corpus in {embedded.corpus_folder()} ..."]
    prepared = [path for path in embedded.cache_folder().iterdir() if path.name != "index"]
    assert prepared == [embedded.corpus_folder()]


def test_an_interrupted_preparation_leaves_nothing(small_library: Path, monkeypatch) -> None:
    def interrupt(path: Path, documents: object) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_write_source", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embedded.prepare()
    assert list(embedded.cache_folder().iterdir()) == []
    assert read("data") == ["y = 2\n"]


def test_of_racing_preparations_one_wins(small_library: Path, monkeypatch) -> None:
    barrier = threading.Barrier(3)
    publish = embedded._publish

    def wait_and_publish(staged: Path, folder: Path) -> None:
        barrier.wait(timeout=30)
        publish(staged, folder)

    monkeypatch.setattr(embedded, "_publish", wait_and_publish)
    threads = [threading.Thread(target=embedded.prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(embedded.cache_folder().iterdir()) == [embedded.corpus_folder()]
    assert read("data") == ["y = 2\n"]


def test_a_cache_that_cannot_be_written_is_an_error(small_library, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set the environment variable HLAT_CACHE to a folder"):
        embedded.prepare()


def test_a_full_disk_is_an_error(small_library: Path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        embedded.prepare()
    assert list(embedded.cache_folder().iterdir()) == []


def test_a_library_without_sources_is_an_error(small_library: Path) -> None:
    for path in small_library.rglob("*.py"):
        path.unlink()
    with pytest.raises(ConfigError, match="has none for code, data, prose; set data= to a corpus"):
        embedded.prepare()


@pytest.mark.usefixtures("embedded_folder")
@pytest.mark.parametrize("name", library.NAMES)
def test_the_real_library_fills_every_source(name: str) -> None:
    corpus = Corpus(find_files("key", "/nowhere", [f"embedded:{name}"]), "text")
    assert len(corpus) > 64
    assert corpus.num_bytes > 500_000
    assert all(corpus.text(row).strip() for row in range(len(corpus)))


@pytest.mark.usefixtures("embedded_folder")
def test_the_embedded_corpus_and_tokenizer_feed_a_run(eos: str) -> None:
    sources = {name: Source([f"embedded:{name}"]) for name in library.NAMES}
    data = Data(name="embedded", sources=sources, tokenizer="embedded", eos_token=eos)
    loader = open_loader(data, Phase("p", [Stage("main")]), Batch(6, 1, 128), 1)
    for _ in range(5):
        batch = loader.next().tokens
    heldout = loader.heldout(2)
    loader.close()
    assert batch.shape == (6, 128)
    assert {name: found.sequences.tokens.shape for name, found in heldout.items()} == dict.fromkeys(
        library.NAMES, (2, 128)
    )
    assert all(0.1 < found.tokens_per_byte < 0.6 for found in heldout.values())
