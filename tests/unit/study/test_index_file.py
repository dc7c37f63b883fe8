"""The index repeats the run directories: changed, removed and damaged files, several writers."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.study import index_file
from hlat.study.index_file import INDEX_NAME, load_run_list
from tests.support.other_user import NOBODY, act_as_nobody, needs_root

WriteRun = Callable[..., Path]


def _names(root: Path) -> list[str]:
    return [row["run"] for row in load_run_list(root).rows]


def test_only_changed_runs_are_read_again(
    tmp_path: Path, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "group/c"):
        write_run(name)
    root, read = tmp_path / "runs", []
    build = index_file.build_run_row
    monkeypatch.setattr(
        index_file, "build_run_row", lambda path, top: read.append(path.name) or build(path, top)
    )
    first = load_run_list(root)
    assert [row["run"] for row in first.rows] == ["a", "b", "group/c"]
    assert first.rows[0]["heldout_bits_per_byte"] == 2.0
    assert first.rows[0]["heldout_bits_per_byte.code"] == 3.0
    assert read == ["a", "b", "c"]
    second = load_run_list(root)
    assert (second.rows, second.settings) == (first.rows, first.settings)
    assert second.settings[0]["optimizer.lr"] == 0.1
    assert read == ["a", "b", "c"]
    write_run("b", bits=1.25)
    assert load_run_list(root).rows[1]["heldout_bits_per_byte"] == 1.25
    shutil.rmtree(root / "a")
    assert _names(root) == ["b", "group/c"]
    assert read == ["a", "b", "c", "b"]


def test_settings_of_an_earlier_version_have_present_keys(
    tmp_path: Path, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run("a")
    build = index_file.build_run_row
    monkeypatch.setattr(
        index_file, "build_run_row", lambda *args: (build(*args)[0], {"precision.weights": "bf16"})
    )
    load_run_list(tmp_path / "runs")  # stores it in the index
    runs = load_run_list(tmp_path / "runs")
    assert runs.settings == [{"precision.param_dtype": "bf16"}]
    for column in ("precision.weights", "config.precision.weights", "precision.param_dtype"):
        assert index_file.resolve_columns(runs, [column]) == ["config.precision.param_dtype"]


def test_running_runs_are_listed_but_not_stored(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("a", end=None)
    (row,) = load_run_list(tmp_path / "runs").rows
    assert row["state"] == "running or killed"
    assert not (tmp_path / "runs" / INDEX_NAME).exists()


@pytest.mark.parametrize("damage", [b"", b"not a database", None])
def test_a_damaged_index_is_rebuilt(
    tmp_path: Path, write_run: WriteRun, damage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("a")
    root = tmp_path / "runs"
    expected = load_run_list(root).rows
    file = root / INDEX_NAME
    content = file.read_bytes()
    file.write_bytes(content[:-5000] + b"\xff" * 5000 if damage is None else damage)
    assert load_run_list(root).rows == expected
    capsys.readouterr()
    assert load_run_list(root).rows == expected
    assert capsys.readouterr().err == "", "the index was written again"


@pytest.mark.slow
def test_concurrent_writers_produce_a_valid_index(tmp_path: Path, write_run: WriteRun) -> None:
    root = tmp_path / "runs"
    for number in range(6):
        write_run(f"run{number}")
    code = (
        "import sys; from pathlib import Path; from hlat.study.index_file import load_run_list\n"
        "for _ in range(5): assert len(load_run_list(Path(sys.argv[1]), rebuild=True).rows) == 6"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(root)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    with sqlite3.connect(root / INDEX_NAME) as index:
        assert index.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert index.execute("SELECT COUNT(*) FROM run").fetchone() == (6,)
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == [INDEX_NAME]


@pytest.fixture
def shared_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a root that other users may read, and set a cache directory that they may write."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        cache, root = Path(directory) / "cache", Path(directory) / "runs"
        cache.mkdir()
        os.chown(cache, NOBODY, NOBODY)
        monkeypatch.setenv("HLAT_CACHE", str(cache))
        root.mkdir()
        root.chmod(0o755)
        yield root


@needs_root
def test_another_user_stores_rows_that_the_index_of_the_root_lacks(
    shared_root: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("a", root=shared_root)
    load_run_list(shared_root)
    index = shared_root / INDEX_NAME
    content = index.read_bytes()
    write_run("b", lr=0.2, root=shared_root)
    with act_as_nobody():
        assert _names(shared_root) == ["a", "b"]
        assert "runs is not writable; the index is " in capsys.readouterr().err
        second = load_run_list(shared_root)
        assert not second.fresh_settings, "both are in an index"
        assert [each["optimizer.lr"] for each in second.settings] == [0.1, 0.2]
        assert capsys.readouterr().err == ""
    index.chmod(0o600)
    with act_as_nobody():
        assert _names(shared_root) == ["a", "b"]
        assert not load_run_list(shared_root).fresh_settings
    assert index.read_bytes() == content
    assert [path.name for path in shared_root.glob(".*")] == [INDEX_NAME]


@needs_root
def test_users_of_a_writable_root_replace_the_index_of_each_other(
    shared_root: Path, write_run: WriteRun
) -> None:
    """Include a run that only one of the users may read."""
    shared_root.chmod(0o777)
    write_run("a", root=shared_root).chmod(0o700)
    load_run_list(shared_root)
    write_run("b", root=shared_root)
    with act_as_nobody():
        assert _names(shared_root) == ["b"]
    assert (shared_root / INDEX_NAME).stat().st_uid == NOBODY
    assert _names(shared_root) == ["a", "b"]
    assert not load_run_list(shared_root).fresh_settings


@needs_root
def test_the_index_of_another_user_in_a_root_with_the_sticky_bit_remains(
    shared_root: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("a", root=shared_root)
    load_run_list(shared_root)
    shared_root.chmod(0o1777)
    write_run("b", root=shared_root)
    (write_run("c", root=shared_root) / "events.jsonl").chmod(0o600)
    with act_as_nobody():
        assert _names(shared_root) == ["a", "b"]
        assert f"skipped unreadable directories (1), such as {shared_root}/c" in (
            capsys.readouterr().err
        )
        assert not load_run_list(shared_root).fresh_settings
    assert [path.name for path in shared_root.glob(".*")] == [INDEX_NAME]


def test_runs_of_a_read_only_root_are_listed(
    tmp_path: Path, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run("a")

    def refuse(**_: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(index_file.tempfile, "mkstemp", refuse)
    assert _names(tmp_path / "runs") == ["a"]
    with pytest.raises(ConfigError, match="is not a directory"):
        load_run_list(tmp_path / "missing")
