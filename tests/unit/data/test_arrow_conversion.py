"""Test atomic conversion of files that cannot be mapped."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data import arrow_conversion
from hlat.data.arrow_dataset import ArrowDataset
from hlat.storage.data_file import DataFile

TEXTS = ["one", None, "", "✓ four"] * 5


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    table = pa.table({"vector": [[1.0, 2.0]] * len(TEXTS), "text": TEXTS})
    pa.parquet.write_table(table, path, row_group_size=7)
    return path


def read_all(path: Path) -> list[str]:
    corpus = ArrowDataset([path], "text")
    return [corpus.read_text(row) for row in range(len(corpus))]


def list_staged_suffixes() -> list[str]:
    return sorted(path.suffix for path in arrow_conversion.get_staging_dir().iterdir())


EXPECTED = [text or "" for text in TEXTS]
DONE = ["", ".lock"]


def test_parquet_is_converted_once_with_a_message(parquet: Path, capsys, monkeypatch) -> None:
    assert read_all(parquet) == EXPECTED
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"converting 1 file to Arrow in {arrow_conversion.get_staging_dir()} ..."
    monkeypatch.setattr(
        arrow_conversion, "_write_arrow_file", lambda *_: pytest.fail("converted again")
    )
    assert read_all(parquet) == EXPECTED
    assert capsys.readouterr().err == ""
    assert list_staged_suffixes() == DONE


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())]
)
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_arrow_is_converted_if_it_cannot_be_mapped(
    tmp_path: Path, stream: bool, compression, type_: pa.DataType, write_arrow
) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, TEXTS, stream=stream, compression=compression, type_=type_)
    assert read_all(path) == EXPECTED
    assert arrow_conversion.get_staging_dir().exists() == (
        compression is not None or type_ != pa.string()
    )


@pytest.mark.parametrize("documents", [[], [None] * 3])
def test_files_without_text(tmp_path: Path, documents) -> None:
    table = pa.table({"text": pa.array(documents, pa.large_string())})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_all(tmp_path / "a.parquet") == [""] * len(documents)


def test_other_columns_are_removed(parquet: Path) -> None:
    ((path, *_),) = arrow_conversion.convert_files([DataFile.from_path(parquet)], "text").values()
    assert pa.ipc.open_file(str(path)).schema.names == ["text"]


def test_changed_files_are_converted_again(parquet: Path) -> None:
    assert read_all(parquet) == EXPECTED
    pa.parquet.write_table(pa.table({"text": ["new"]}), parquet)
    assert read_all(parquet) == ["new"]


def test_fingerprint_is_independent_of_the_conversion(
    tmp_path: Path, parquet: Path, write_arrow
) -> None:
    mapped = write_arrow(tmp_path / "b" / "a.parquet", TEXTS)
    prints = [ArrowDataset([path], "text").compute_fingerprint() for path in (parquet, mapped)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "without index", "empty"])
def test_damaged_conversions_are_replaced(parquet: Path, damage: str) -> None:
    ((path, *_),) = arrow_conversion.convert_files([DataFile.from_path(parquet)], "text").values()
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-30])
    elif damage == "flipped":
        path.write_bytes(content[:-30] + bytes(byte ^ 1 for byte in content[-30:]))
    elif damage == "without index":
        path.with_name("text.arrow.rows.npy").unlink()
    else:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
    assert read_all(parquet) == EXPECTED
    assert path.read_bytes() == content


def test_concurrent_readers_convert_each_file_once(
    tmp_path: Path, parquet: Path, monkeypatch
) -> None:
    files = []
    for number in range(6):
        shutil.copy(parquet, tmp_path / f"{number}.parquet")
        files.append(tmp_path / f"{number}.parquet")
    converted, results = [], []
    convert, barrier = arrow_conversion._write_arrow_file, threading.Barrier(2)

    def record_and_convert(file: DataFile, *arguments):
        converted.append(file.name)
        if len(converted) <= 2:
            barrier.wait(timeout=30)  # both convert concurrently
        return convert(file, *arguments)

    monkeypatch.setattr(arrow_conversion, "_write_arrow_file", record_and_convert)
    run = lambda: results.append(len(ArrowDataset(files, "text")))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [6 * len(TEXTS)] * 2
    assert sorted(converted) == [path.name for path in files]


def test_waiting_for_another_process_prints_a_message(parquet: Path, monkeypatch) -> None:
    messages, waits = [], threading.Event()
    monkeypatch.setattr(
        arrow_conversion.tqdm, "write", lambda *text: (messages.append(text), waits.set())
    )
    target = arrow_conversion._get_target_dir(DataFile.from_path(parquet), "text")
    target.parent.mkdir(parents=True)
    with target.with_suffix(".lock").open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        results: list[list[str]] = []
        waiter = threading.Thread(target=lambda: results.append(read_all(parquet)))
        waiter.start()
        assert waits.wait(timeout=30)
        assert results == []
    waiter.join()
    assert results == [EXPECTED]
    assert messages == [(f"waiting for the process that converts {parquet}", sys.stderr)]


def test_files_of_a_killed_conversion_are_removed(tmp_path: Path, parquet: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from hlat.data import row_index\n"
        "from hlat.data.arrow_dataset import ArrowDataset\n"
        "row_index.save_row_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ArrowDataset([Path(sys.argv[1])], 'text')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(parquet)], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    assert list_staged_suffixes() == [".lock", ".part"]
    other = tmp_path / "b.parquet"
    shutil.copy(parquet, other)
    assert read_all(other) == EXPECTED
    assert list_staged_suffixes() == ["", ".lock", ".lock"]  # the partial file is removed
    assert read_all(parquet) == EXPECTED


def test_partial_files_of_running_processes_remain(parquet: Path) -> None:
    part = arrow_conversion.get_staging_dir() / "other.part"
    part.mkdir(parents=True)
    with part.with_suffix(".lock").open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert read_all(parquet) == EXPECTED
        assert part.exists()


def test_failed_conversions_are_removed(parquet: Path, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arrow_conversion.row_index, "save_row_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            read_all(parquet)
    assert list_staged_suffixes() == [".lock"]
    assert read_all(parquet) == EXPECTED


def test_damaged_parquet_is_an_error(parquet: Path) -> None:
    content = parquet.read_bytes()
    for length in (4, 12, len(content) // 2, len(content) - 1):
        parquet.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=f"{parquet}: not a whole Arrow or Parquet file"):
            read_all(parquet)
    assert ".part" not in list_staged_suffixes()


def test_a_missing_column_is_an_error_with_its_key(parquet: Path) -> None:
    with pytest.raises(ConfigError) as error:
        ArrowDataset([parquet], "body", "data.sources.a.text_column")
    assert str(error.value).startswith(f"data.sources.a.text_column=body: {parquet} has no column")


def test_disk_space_is_checked_before_the_conversion(parquet: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(parquet.parent)._replace(free=100)
    monkeypatch.setattr(arrow_conversion.shutil, "disk_usage", lambda path: usage)
    other = parquet.with_name("b.parquet")
    shutil.copy(parquet, other)
    with pytest.raises(ConfigError) as error:
        ArrowDataset([parquet, other], "text")
    assert str(error.value) == (
        f"{parquet} and 1 more: must be converted, which takes 0.0 GB or more; {arrow_conversion.get_staging_dir()} has "
        "0.0 GB free; convert it ahead of the run with `hlat prepare`, or set the "
        "environment variable HLAT_CACHE to a folder on a larger disk"
    )


def test_full_disk_is_an_error_with_a_remedy(parquet: Path, monkeypatch) -> None:
    def raise_no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrow_conversion.os, "fsync", raise_no_space)
    with pytest.raises(ConfigError, match=r"\(No space left on device\); convert .* HLAT_CACHE"):
        read_all(parquet)
    assert list_staged_suffixes() == [".lock"]


def test_unwritable_cache_is_an_error_with_a_remedy(parquet: Path, cache_dir: Path) -> None:
    cache_dir.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot convert files in .* HLAT_CACHE to a folder"):
        read_all(parquet)


def test_converted_files_are_read_from_a_read_only_cache(parquet: Path, monkeypatch) -> None:
    assert read_all(parquet) == EXPECTED
    monkeypatch.setattr(os, "mkdir", lambda *_: pytest.fail("wrote"))
    monkeypatch.setattr(arrow_conversion, "_lock_file", lambda *_: pytest.fail("locked"))
    assert read_all(parquet) == EXPECTED
