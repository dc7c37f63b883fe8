"""Test that an index is used only for the file that it was built from."""

import os
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data import row_index
from hlat.data.arrow_dataset import ArrowDataset
from hlat.storage.data_file import DataFile


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_scan(monkeypatch):
    """Return a function that makes subsequent builds of an index fail the test."""

    def forbid() -> None:
        monkeypatch.setattr(row_index, "build_row_index", lambda *_: pytest.fail("scanned"))

    return forbid


def read_all(path: Path, column: str = "text") -> list[str]:
    corpus = ArrowDataset([path], column)
    return [corpus.read_text(row) for row in range(len(corpus))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("type_", "width"), [(pa.string(), 4), (pa.large_string(), 8)])
def test_entries_contain_sizes_and_offsets_of_batches(
    tmp_path: Path, stream: bool, type_: pa.DataType, width: int, write_arrow
) -> None:
    documents = ["zero", "one", "two", None, "four"]
    path = write_arrow(
        tmp_path / "a.arrow", documents, rows_per_batch=3, type_=type_, stream=stream
    )
    index, content = row_index.build_row_index(path, "text"), path.read_bytes()
    assert index.dtype == row_index.BATCH_DTYPE
    assert index["rows"].tolist() == [3, 2]
    assert index["width"].tolist() == [width, width]
    assert index["num_bytes"].tolist() == [10, 4]
    assert (index["validity"] == -1).tolist() == [True, False]
    assert content[index["validity"][1]] & 3 == 0b10
    offsets = np.frombuffer(content, f"<i{width}", 4, int(index["offsets"][0]))
    assert offsets.tolist() == [0, 4, 7, 10]
    assert content[index["text"][0] :].startswith(b"zeroonetwo")


def test_sidecar_replaces_the_scan(tmp_path: Path, cache_dir: Path, write_arrow, no_scan) -> None:
    for name, documents in (("a.arrow", ["a", None, "b"]), ("empty.arrow", [])):
        path = write_arrow(tmp_path / name, documents)
        row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    assert read_all(tmp_path / "a.arrow") == ["a", "", "b"]
    assert read_all(tmp_path / "empty.arrow") == []
    assert len(list((cache_dir / "index").iterdir())) == 2  # compared and copied
    shutil.rmtree(cache_dir)
    no_scan()
    assert len(ArrowDataset([tmp_path / "a.arrow"], "text")) == 3
    assert not cache_dir.exists()
    assert sorted(os.listdir(tmp_path)) == [
        "a.arrow",
        "a.arrow.rows.npy",
        "empty.arrow",
        "empty.arrow.rows.npy",
    ]


def test_numpy_reads_a_sidecar(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["a", "b"], rows_per_batch=1)
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    record = np.load(row_index.get_sidecar_path(path), allow_pickle=False)
    assert (record["batches"] == row_index.build_row_index(path, "text")).all()
    assert b'"column": "text"' in record["about"].item()


def test_scans_are_cached(tmp_path: Path, cache_dir: Path, write_arrow, no_scan) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["a", "b"])
    assert read_all(path) == ["a", "b"]
    (tmp_path / "link.arrow").symlink_to(path)
    no_scan()
    assert read_all(path) == ["a", "b"]
    assert read_all(tmp_path / "link.arrow") == ["a", "b"]
    assert len(list((cache_dir / "index").iterdir())) == 1


def test_unwritable_cache_is_ignored(tmp_path: Path, cache_dir: Path, write_arrow) -> None:
    cache_dir.write_text("a file")
    path = write_arrow(tmp_path / "a.arrow", ["a", "b"])
    assert read_all(path) == read_all(path) == ["a", "b"]


@pytest.mark.parametrize("location", ["sidecar", "cache"])
def test_outdated_indices_are_not_used(
    tmp_path: Path, cache_dir: Path, location: str, write_arrow
) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["first", "second"], rows_per_batch=2)
    if location == "sidecar":
        row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    assert read_all(path) == ["first", "second"]
    before = path.stat()
    write_arrow(path, ["other", "values"], rows_per_batch=1)
    size = path.stat().st_size
    assert size != before.st_size
    assert read_all(path) == ["other", "values"]
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    write_arrow(path, ["thing", "filled"], rows_per_batch=1, column="body")
    assert path.stat().st_size == size  # only the bytes differ
    assert read_all(path, "body") == ["thing", "filled"]


def test_indices_of_another_column_are_not_used(tmp_path: Path, cache_dir, write_arrow) -> None:
    table = pa.table({"text": ["a", "b"], "title": ["long titles", "c"]})
    path = tmp_path / "a.arrow"
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    assert read_all(path, "title") == ["long titles", "c"]
    assert read_all(path) == ["a", "b"]


def test_indices_of_another_format_are_not_used(
    tmp_path: Path, cache_dir, write_arrow, monkeypatch
) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["a"])
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    assert row_index.find_row_index(DataFile.from_path(path), "text") is not None
    monkeypatch.setattr(row_index, "FORMAT_VERSION", row_index.FORMAT_VERSION + 1)
    assert row_index.find_row_index(DataFile.from_path(path), "text") is None


@pytest.mark.slow
def test_damaged_indices_are_not_used(tmp_path: Path, cache_dir, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["a", "b"], rows_per_batch=1)
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    sidecar = row_index.get_sidecar_path(path)
    content = sidecar.read_bytes()
    for position in range(len(content)):
        sidecar.write_bytes(
            content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]
        )
        assert row_index.load_row_index(sidecar, path, "text") is None
        sidecar.write_bytes(content[:position])
        assert row_index.load_row_index(sidecar, path, "text") is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", row_index.BATCH_DTYPE.names)
def test_sidecars_with_wrong_content_are_rejected_or_not_used(
    tmp_path: Path, cache_dir: Path, write_arrow, make_documents, field: str, stream: bool
) -> None:
    documents = [*make_documents("sidecar", 20), None]
    path = write_arrow(tmp_path / "a.arrow", documents, rows_per_batch=5, stream=stream)
    right = row_index.build_row_index(path, "text")
    sidecar, num_rejected, num_derived = row_index.get_sidecar_path(path), 0, 0
    for batch, change in product(range(len(right)), (1, -1, 8, -8, 2**40, -(2**62))):
        shutil.rmtree(cache_dir, ignore_errors=True)
        index = right.copy()
        index[field][batch] += change
        row_index.save_row_index(index, path, "text")
        try:
            found = read_all(path)
        except ConfigError as error:
            num_rejected += str(error).startswith(
                f"{sidecar} does not describe the rows of {path};"
            )
        else:
            num_derived += found == [text or "" for text in documents]
    assert num_rejected + num_derived == 6 * len(right)
    assert num_derived >= 2 * len(right)  # far outside of the file, such an index is not used
    assert num_rejected or field == "width"
    for index in (right[:-1], np.concatenate([right, right])):
        shutil.rmtree(cache_dir, ignore_errors=True)
        row_index.save_row_index(index, path, "text")
        with pytest.raises(ConfigError, match="does not describe the rows"):
            read_all(path)
    shutil.rmtree(cache_dir, ignore_errors=True)
    row_index.save_row_index(right[:0], path, "text")
    assert len(read_all(path)) == len(documents)


def test_a_sidecar_is_compared_once_per_cache_directory(
    tmp_path: Path, cache_dir: Path, write_arrow, monkeypatch
) -> None:
    path, calls = write_arrow(tmp_path / "a.arrow", ["a", "b"]), []
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    build = row_index.build_row_index
    monkeypatch.setattr(row_index, "build_row_index", lambda *a: calls.append(a) or build(*a))
    assert ArrowDataset([path], "text").num_bytes == 2
    assert not calls  # the file is mapped when a document is read
    for _ in range(3):
        assert read_all(path) == ["a", "b"]
    assert len(calls) == 1


def test_failed_write_leaves_no_partial_index(tmp_path: Path, write_arrow, monkeypatch) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["a"])
    index = row_index.build_row_index(path, "text")

    def raise_no_space(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", raise_no_space)
    with pytest.raises(OSError, match="No space left"):
        row_index.save_row_index(index, path, "text")
    assert os.listdir(tmp_path) == ["a.arrow"]


@pytest.mark.parametrize(
    ("file_format", "reason"),
    [
        ("compressed", "its buffers are compressed"),
        ("view", "its text column is string_view"),
        ("parquet", "it is Parquet"),
    ],
)
def test_files_that_cannot_be_mapped_are_rejected(
    tmp_path: Path, file_format: str, reason: str, write_arrow
) -> None:
    path = tmp_path / "a"
    if file_format == "parquet":
        pa.parquet.write_table(pa.table({"text": ["a"]}), path)
    elif file_format == "view":
        write_arrow(path, ["a"], type_=pa.string_view())
    else:
        write_arrow(path, ["a" * 1000] * 9, compression="zstd")
    with pytest.raises(row_index.CannotMapError, match=f"{path}: {reason} and cannot be mapped"):
        row_index.build_row_index(path, "text")
