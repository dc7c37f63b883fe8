"""Discovery of document files, without metadata, caches and hidden files."""

import gzip
import json
import os
from pathlib import Path

import fsspec
import pytest

from hlat.config.config_errors import ConfigError
from hlat.prepare import input_files
from hlat.prepare.input_files import SkippedFile


def _touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def _names(root: Path, *patterns: str, output: Path | None = None) -> list[str]:
    found = input_files.find_input_files([str(root / pattern) for pattern in patterns], output)
    return [one.location.removeprefix(f"{root}/") for one in found]


def test_directories_files_and_globs_are_found_once_and_sorted(tmp_path: Path) -> None:
    _touch(tmp_path, "b/c/2.jsonl", "b/1.jsonl.zst", "b/LICENSE", "a.parquet", "b/.cache/3.jsonl")
    expected = ["a.parquet", "b/1.jsonl.zst", "b/LICENSE", "b/c/2.jsonl"]
    assert _names(tmp_path, "") == expected
    assert _names(tmp_path, "b", "*.parquet", "b/**/*.jsonl", "b/1.jsonl.zst") == expected


def test_files_without_a_known_suffix_are_selected_by_content(tmp_path: Path) -> None:
    contents = {
        "ls.1.gz": gzip.compress(b".TH LS 1\n"),
        "README": b"caf\xe9\n",
        "x.dat": b"PAR1",
        "photo.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
        "x.tar.gz": gzip.compress(b"a.txt" + bytes(500)),
        "y.zip": b"PK\x03\x04\x14\x00",
        "t.csv": b"a,b\n1,2\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken").symlink_to("missing")
    skipped: list[SkippedFile] = []
    found = input_files.find_input_files([str(tmp_path)], None, skipped)
    assert [Path(file.location).name for file in found] == ["README", "ls.1.gz", "x.dat"]
    assert {(Path(one.path).name, one.num_bytes, one.reason.split(" (")[0]) for one in skipped} == {
        ("broken", 0, "no regular file"),
        ("photo.jpg", len(contents["photo.jpg"]), "not text"),
        ("t.csv", len(contents["t.csv"]), "a table"),
        ("x.tar.gz", len(contents["x.tar.gz"]), "not text"),
        ("y.zip", len(contents["y.zip"]), "a zip archive"),
    }


def test_output_of_other_preparations_is_excluded_unless_it_is_the_input(tmp_path: Path) -> None:
    _touch(tmp_path, "a.txt", "old/part-00000.arrow", "new/part-00000.arrow", "web/b.txt")
    (tmp_path / "old/manifest.json").write_text('{"format": 1, "input_column": "", "files": []}')
    (tmp_path / "web/manifest.json").write_text('{"name": "page"}')
    skipped: list[SkippedFile] = []
    found = input_files.find_input_files([str(tmp_path)], tmp_path / "new", skipped)
    assert [Path(file.location).name for file in found] == ["a.txt", "b.txt"]
    output = {Path(one.path).parent.name: one.reason for one in skipped}
    assert output == dict.fromkeys(("old", "new"), "output of hlat prepare")
    assert _names(tmp_path, "old") == ["old/part-00000.arrow"]
    assert _names(tmp_path, "*", output=tmp_path / "new") == ["a.txt", "web/b.txt"]


def test_existing_path_takes_precedence_over_a_glob(tmp_path: Path) -> None:
    _touch(tmp_path, "[a].jsonl", "a.jsonl")
    assert _names(tmp_path, "[a].jsonl") == ["[a].jsonl"]


def test_links_have_the_size_and_time_of_their_target(tmp_path: Path) -> None:
    _touch(tmp_path, "blobs/0a1b")
    (tmp_path / "blobs/0a1b").write_text("four")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/1.jsonl").symlink_to("../blobs/0a1b")
    (found,) = input_files.find_input_files([str(tmp_path / "snapshot")])
    assert found.num_bytes == 4
    assert found.version == str((tmp_path / "blobs/0a1b").stat().st_mtime_ns)


def test_urls_of_other_file_systems(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/inputs/b/2.jsonl", b"{}")
    memory.pipe("/inputs/1.jsonl", b"{}\n")
    _touch(tmp_path, "x.jsonl")
    found = input_files.find_input_files(["memory://inputs", f"file://{tmp_path}"])
    assert [one.location for one in found] == [
        str(tmp_path / "x.jsonl"),
        "memory:///inputs/1.jsonl",
        "memory:///inputs/b/2.jsonl",
    ]
    assert [one.num_bytes for one in found] == [1, 3, 2]
    with input_files.InputReader(found[1].location) as file:
        assert file.read() == b"{}\n"


def test_files_of_saved_datasets_are_those_of_their_state(tmp_path: Path) -> None:
    _touch(
        tmp_path,
        "saved/data-00000-of-00001.arrow",
        "saved/cache-1f.arrow",
        "saved/dataset_info.json",
    )
    state = tmp_path / "saved/state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert _names(tmp_path, "saved") == ["saved/data-00000-of-00001.arrow"]
    state.write_text(json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "i"}]}))
    with pytest.raises(ConfigError, match="flatten_indices"):
        _names(tmp_path, "saved")
    for name in ("../outside.arrow", "/outside.arrow", ".."):
        state.write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(ConfigError, match="which is missing" if name != ".." else "saved"):
            _names(tmp_path, "saved")


def test_dataset_with_several_splits_is_rejected(tmp_path: Path) -> None:
    _touch(tmp_path, "d/train/1.arrow", "d/test/1.arrow")
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ConfigError, match=r"splits train, test; specify the directory of one, such as .*/d/train"
    ):
        _names(tmp_path, "d")
    assert _names(tmp_path, "d/train") == ["d/train/1.arrow"]


def test_output_directory_is_excluded_from_the_input(tmp_path: Path) -> None:
    _touch(tmp_path, "1.jsonl", "out/part-00000.arrow")
    assert _names(tmp_path, "", output=tmp_path / "out") == ["1.jsonl"]
    with pytest.raises(ConfigError, match="is in output="):
        _names(tmp_path, "out", output=tmp_path / "out")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    _touch(tmp_path, "a.csv", "t/x.jsonl", "t/x.jsonl.zst")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/readme.doc").write_bytes(b"\xd0\xcf\x11\xe0\x00\x00")
    with pytest.raises(ConfigError) as error:
        input_files.find_input_files(
            [str(tmp_path / name) for name in ("no", "*.no", "a.csv", "b", "t")]
            + ["s4://x", "nofs://x"]
        )
    message = "\n".join(error.value.problems)
    assert len(error.value.problems) == 7
    assert "no: there is no such file or directory" in message
    assert "a.csv: is a table (write the documents to JSON lines or Parquet); supp" in message
    assert "b: contains no document file (text, source code" in message
    assert "it contains 1 not text" in message
    assert "x.jsonl.zst: the same documents, by their names" in message
    assert "s4://x: s4 is not an allowed protocol" in message


def test_error_of_a_failed_driver_contains_the_path(monkeypatch, tmp_path: Path) -> None:
    _touch(tmp_path, "1.jsonl")
    memory = fsspec.filesystem("memory")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(memory), "exists", refuse)
    with pytest.raises(ConfigError, match=r"memory://x: cannot be listed \(no credentials\)"):
        input_files.find_input_files(["memory://x"])
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"1.jsonl: cannot be read \(No such file or directory\)"):
        input_files.InputReader(str(tmp_path / "1.jsonl"))


@pytest.mark.parametrize("pattern", ["a.jsonl", "", "*.jsonl"])
def test_refuse_pipes_without_opening_them(tmp_path: Path, pattern: str) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    message = f"{tmp_path}/a.jsonl: is no regular file; a pipe or device cannot be prepared"
    with pytest.raises(ConfigError) as error:
        _names(tmp_path, pattern)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize(
    "content", ["3", '{"splits": 3}', "[" * 100_000, "1e400", "\xff", None], ids=range(6)
)
def test_refuse_invalid_metadata_of_saved_datasets(
    tmp_path: Path, name: str, content: str | None
) -> None:
    _touch(tmp_path, "d/a.arrow")
    (tmp_path / "d/dataset_info.json").write_text("{}")
    path = tmp_path / "d" / name
    with path.open("w") as file:
        if content is None:
            file.truncate(3 << 30)
        else:
            file.write(content)
    for pattern in (f"{tmp_path}/d", f"file://{tmp_path}/d"):
        with pytest.raises(ConfigError) as error:
            input_files.find_input_files([pattern])
        assert f"{tmp_path}/d" in str(error.value)
        assert name in str(error.value)
