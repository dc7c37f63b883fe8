"""Test the atomic preparation of the embedded corpus."""

import os
import threading
from pathlib import Path

import pytest

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.data import DataConfig, SourceConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import data_cache, embedded_corpus
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.data_loader import build_data_loader
from hlat.data.source_files import find_source_files


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch) -> Path:
    """Replace the standard library by three files and use an empty cache."""
    root = tmp_path / "library"
    (root / "test").mkdir(parents=True)
    (root / "a.py").write_text('"""Prose."""\nx = 1\n')
    (root / "b.py").write_text("x = 1\n")
    (root / "test" / "c.py").write_text("y = 2\n")
    monkeypatch.setattr(embedded_corpus.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return root


def read(name: str) -> list[str]:
    corpus = ArrowDataset([embedded_corpus.get_embedded_source_file("key", name)], "text")
    return [corpus.read_text(row) for row in range(len(corpus))]


def test_cache_directory_is_set_by_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("HLAT_CACHE", "/x/y")
    monkeypatch.setenv("XDG_CACHE_HOME", "/z")
    monkeypatch.setenv("HOME", "/h")
    assert data_cache.get_cache_dir() == Path("/x/y")
    monkeypatch.delenv("HLAT_CACHE")
    assert data_cache.get_cache_dir() == Path("/z/hlat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_cache.get_cache_dir() == Path("/h/.cache/hlat")


def test_sources_are_prepared_once_with_a_message(small_library: Path, capsys) -> None:
    assert read("code") == ["x = 1\n"]  # b.py equals a.py and is removed
    assert read("prose") == ["Prose."]
    assert read("data") == ["y = 2\n"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"preparing the embedded corpus in {embedded_corpus.get_embedded_corpus_dir()} ..."
    ]
    prepared = [path for path in data_cache.get_cache_dir().iterdir() if path.name != "index"]
    assert prepared == [embedded_corpus.get_embedded_corpus_dir()]


def test_interrupted_preparation_is_removed(small_library: Path, monkeypatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embedded_corpus.prepare_embedded_corpus()
    assert list(data_cache.get_cache_dir().iterdir()) == []
    assert read("data") == ["y = 2\n"]


def test_concurrent_preparations_publish_one_result(small_library: Path, monkeypatch) -> None:
    barrier = threading.Barrier(3)
    publish = embedded_corpus._publish_directory

    def wait_and_publish(staged: Path, folder: Path) -> None:
        barrier.wait(timeout=30)
        publish(staged, folder)

    monkeypatch.setattr(embedded_corpus, "_publish_directory", wait_and_publish)
    threads = [threading.Thread(target=embedded_corpus.prepare_embedded_corpus) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(data_cache.get_cache_dir().iterdir()) == [embedded_corpus.get_embedded_corpus_dir()]
    assert read("data") == ["y = 2\n"]


def test_unwritable_cache_is_an_error(small_library, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set the environment variable HLAT_CACHE to a folder"):
        embedded_corpus.prepare_embedded_corpus()


def test_full_disk_is_an_error(small_library: Path, monkeypatch) -> None:
    def raise_no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded_corpus.os, "fsync", raise_no_space)
    with pytest.raises(ConfigError, match="No space left on device"):
        embedded_corpus.prepare_embedded_corpus()
    assert list(data_cache.get_cache_dir().iterdir()) == []


def test_a_library_without_sources_is_an_error(small_library: Path) -> None:
    for path in small_library.rglob("*.py"):
        path.unlink()
    with pytest.raises(ConfigError, match="has none for code, data, prose; set data= to a corpus"):
        embedded_corpus.prepare_embedded_corpus()


@pytest.mark.slow
@pytest.mark.xdist_group("embedded")  # one worker prepares the corpus
@pytest.mark.usefixtures("embedded_folder")
@pytest.mark.parametrize("name", embedded_corpus.SOURCE_NAMES)
def test_standard_library_has_documents_for_every_source(name: str) -> None:
    corpus = ArrowDataset(find_source_files("key", "/nowhere", [f"embedded:{name}"]), "text")
    assert len(corpus) > 64
    assert corpus.num_bytes > 500_000
    assert all(corpus.read_text(row).strip() for row in range(len(corpus)))


@pytest.mark.slow  # 7 s
@pytest.mark.xdist_group("embedded")  # one worker prepares the corpus
@pytest.mark.usefixtures("embedded_folder")
def test_embedded_corpus_and_tokenizer_provide_batches(eos: str) -> None:
    sources = {name: SourceConfig([f"embedded:{name}"]) for name in embedded_corpus.SOURCE_NAMES}
    data = DataConfig(name="embedded", sources=sources, tokenizer="embedded", eos_token=eos)
    loader = build_data_loader(
        data, PhaseConfig("p", [PhaseStage("main")]), BatchConfig(6, 1, 128), 1
    )
    for _ in range(5):
        batch = loader.next_batch().tokens
    heldout = loader.build_heldout_sequences(2)
    loader.close()
    assert batch.shape == (6, 128)
    assert {name: found.sequences.tokens.shape for name, found in heldout.items()} == dict.fromkeys(
        embedded_corpus.SOURCE_NAMES, (2, 128)
    )
    assert all(
        0.1 < found.target_tokens.sum() / found.target_bytes.sum() < 0.6
        for found in heldout.values()
    )
