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
def own_cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    table = pa.table({"vector": [[1.0, 2.0]] * len(TEXTS), "text": TEXTS})
    pa.parquet.write_table(table, path, row_group_size=7)
    return path


def texts_of(path: Path) -> list[str]:
    corpus = ArrowDataset([path], "text")
    return [corpus.read_text(row) for row in range(len(corpus))]


def staged() -> list[str]:
    return sorted(path.suffix for path in arrow_conversion.get_staging_dir().iterdir())


EXPECTED = [text or "" for text in TEXTS]
DONE = ["", ".lock"]


def test_parquet_is_converted_once_and_said_so(parquet: Path, capsys, monkeypatch) -> None:
    assert texts_of(parquet) == EXPECTED
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"converting 1 file to Arrow in {arrow_conversion.get_staging_dir()} ..."
    monkeypatch.setattr(
        arrow_conversion, "_write_arrow_file", lambda *_: pytest.fail("converted again")
    )
    assert texts_of(parquet) == EXPECTED
    assert capsys.readouterr().err == ""
    assert staged() == DONE


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())]
)
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_arrow_is_converted_where_it_has_no_plain_bytes(
    tmp_path: Path, stream: bool, compression, type_: pa.DataType, write_arrow
) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, TEXTS, stream=stream, compression=compression, type_=type_)
    assert texts_of(path) == EXPECTED
    assert arrow_conversion.get_staging_dir().exists() == (
        compression is not None or type_ != pa.string()
    )


@pytest.mark.parametrize("texts", [[], [None] * 3])
def test_files_without_text(tmp_path: Path, texts) -> None:
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == [""] * len(texts)


def test_only_the_text_is_kept(parquet: Path) -> None:
    ((path, *_),) = arrow_conversion.convert_files([DataFile.from_path(parquet)], "text").values()
    assert pa.ipc.open_file(str(path)).schema.names == ["text"]


def test_a_file_that_changed_is_converted_again(parquet: Path) -> None:
    assert texts_of(parquet) == EXPECTED
    pa.parquet.write_table(pa.table({"text": ["new"]}), parquet)
    assert texts_of(parquet) == ["new"]


def test_the_documents_identify_the_source_not_their_conversion(
    tmp_path: Path, parquet: Path, write_arrow
) -> None:
    mapped = write_arrow(tmp_path / "b" / "a.parquet", TEXTS)
    prints = [ArrowDataset([path], "text").compute_fingerprint() for path in (parquet, mapped)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "without index", "empty"])
def test_a_damaged_conversion_is_made_again(parquet: Path, damage: str) -> None:
    ((path, *_),) = arrow_conversion.convert_files([DataFile.from_path(parquet)], "text").values()
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[:-30])
    elif damage == "flipped":
        path.write_bytes(whole[:-30] + bytes(byte ^ 1 for byte in whole[-30:]))
    elif damage == "without index":
        path.with_name("text.arrow.rows.npy").unlink()
    else:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
    assert texts_of(parquet) == EXPECTED
    assert path.read_bytes() == whole


def test_several_processes_share_the_work(tmp_path: Path, parquet: Path, monkeypatch) -> None:
    files = []
    for number in range(6):
        shutil.copy(parquet, tmp_path / f"{number}.parquet")
        files.append(tmp_path / f"{number}.parquet")
    converted, results = [], []
    convert, barrier = arrow_conversion._write_arrow_file, threading.Barrier(2)

    def count(file: DataFile, *arguments):
        converted.append(file.name)
        if len(converted) <= 2:
            barrier.wait(timeout=30)  # both are at work before either goes on
        return convert(file, *arguments)

    monkeypatch.setattr(arrow_conversion, "_write_arrow_file", count)
    run = lambda: results.append(len(ArrowDataset(files, "text")))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [6 * len(TEXTS)] * 2
    assert sorted(converted) == [path.name for path in files]


def test_waiting_for_another_process_is_said(parquet: Path, monkeypatch) -> None:
    said, waits = [], threading.Event()
    monkeypatch.setattr(
        arrow_conversion.tqdm, "write", lambda *text: (said.append(text), waits.set())
    )
    target = arrow_conversion._get_target_dir(DataFile.from_path(parquet), "text")
    target.parent.mkdir(parents=True)
    with target.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        results: list[list[str]] = []
        waiter = threading.Thread(target=lambda: results.append(texts_of(parquet)))
        waiter.start()
        assert waits.wait(timeout=30)
        assert results == []
    waiter.join()
    assert results == [EXPECTED]
    assert said == [(f"waiting for the process that converts {parquet}", sys.stderr)]


def test_a_killed_conversion_leaves_nothing_that_is_used(tmp_path: Path, parquet: Path) -> None:
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
    assert staged() == [".lock", ".part"]
    other = tmp_path / "b.parquet"
    shutil.copy(parquet, other)
    assert texts_of(other) == EXPECTED
    assert staged() == ["", ".lock", ".lock"]  # the part is gone, though nobody asked for its file
    assert texts_of(parquet) == EXPECTED


def test_the_part_of_a_living_process_stays(parquet: Path) -> None:
    part = arrow_conversion.get_staging_dir() / "other.part"
    part.mkdir(parents=True)
    with part.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert texts_of(parquet) == EXPECTED
        assert part.exists()


def test_a_failed_conversion_leaves_nothing(parquet: Path, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arrow_conversion.row_index, "save_row_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            texts_of(parquet)
    assert staged() == [".lock"]
    assert texts_of(parquet) == EXPECTED


def test_damaged_parquet_is_an_error(parquet: Path) -> None:
    whole = parquet.read_bytes()
    for length in (4, 12, len(whole) // 2, len(whole) - 1):
        parquet.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=f"{parquet}: not a whole Arrow or Parquet file"):
            texts_of(parquet)
    assert ".part" not in staged()


def test_a_missing_column_is_an_error_with_its_key(parquet: Path) -> None:
    with pytest.raises(ConfigError) as error:
        ArrowDataset([parquet], "body", "data.sources.a.text_column")
    assert str(error.value).startswith(f"data.sources.a.text_column=body: {parquet} has no column")


def test_too_small_a_disk_is_told_before_anything_is_converted(parquet: Path, monkeypatch) -> None:
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


def test_a_disk_that_fills_is_told(parquet: Path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrow_conversion.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"\(No space left on device\); convert .* HLAT_CACHE"):
        texts_of(parquet)
    assert staged() == [".lock"]


def test_a_cache_that_cannot_be_written_is_told(parquet: Path, own_cache: Path) -> None:
    own_cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot convert files in .* HLAT_CACHE to a folder"):
        texts_of(parquet)


def test_what_is_converted_can_be_read_where_nothing_can_be_written(
    parquet: Path, monkeypatch
) -> None:
    assert texts_of(parquet) == EXPECTED
    monkeypatch.setattr(os, "mkdir", lambda *_: pytest.fail("wrote"))
    monkeypatch.setattr(arrow_conversion, "_lock_file", lambda *_: pytest.fail("locked"))
    assert texts_of(parquet) == EXPECTED
