"""Test the selection and order of the files that paths match."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data import row_index, source_files
from hlat.data.source_files import find_source_files
from hlat.storage.bounded_files import MAX_JSON_BYTES


def find_names(root: Path, *patterns: str) -> list[str]:
    files = find_source_files("key", str(root), patterns)
    return [Path(file.location).relative_to(root).as_posix() for file in files]


def get_error(root: Path, *patterns: str) -> str:
    with pytest.raises(ConfigError) as error:
        find_source_files("data.sources.a.paths", str(root), patterns)
    return str(error.value)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_files_are_found_once_and_in_order(tmp_path: Path, write_arrow) -> None:
    for name in ("b/2.arrow", "b/1.arrow", "b/notes.txt", "a.arrow", "c/d/3.arrow"):
        write_arrow(tmp_path / name, ["x"])
    patterns = ["b", "a.arrow", "b/*.arrow", "c/**/*.arrow", str(tmp_path / "a.arrow")]
    assert find_names(tmp_path, *patterns) == ["a.arrow", "b/1.arrow", "b/2.arrow", "c/d/3.arrow"]
    assert find_names(tmp_path, *patterns[::-1]) == find_names(tmp_path, *patterns)


@pytest.mark.parametrize("pattern", ["no.arrow", "*.feather", "empty"])
def test_a_pattern_without_files_is_an_error(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").mkdir()
    message = get_error(tmp_path, pattern)
    assert message.startswith(f"data.sources.a.paths: no file matches '{tmp_path}/")
    assert "set data.root or the paths of this source" in message


def test_no_patterns_and_unknown_embedded_sources_are_errors(tmp_path: Path) -> None:
    assert get_error(tmp_path).startswith("data.sources.a.paths: is empty")
    unknown = get_error(tmp_path, "embedded:poems")
    assert "there is no embedded:poems; use one of embedded:code" in unknown


def test_unlistable_directory_is_an_error(tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert "(Permission denied)" in get_error(tmp_path, "a")


def test_unreadable_state_is_an_error(tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    write_json(tmp_path / "state.json", {})
    monkeypatch.setattr(source_files, "read_bounded", refuse)
    message = f"data.sources.a.paths: cannot read {tmp_path}/state.json (Permission denied)"
    assert get_error(tmp_path, "") == message


def test_indices_are_excluded(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["x"])
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    assert (
        find_names(tmp_path, "*")
        == find_names(tmp_path, "a.arrow*")
        == find_names(tmp_path, "")
        == ["a.arrow"]
    )


def test_directory_with_two_formats_is_rejected(tmp_path: Path, write_arrow) -> None:
    for name in ("1.parquet", "0.parquet"):
        (tmp_path / "p").mkdir(exist_ok=True)
        pa.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "p" / name)
    assert find_names(tmp_path, "p") == ["p/0.parquet", "p/1.parquet"]
    write_arrow(tmp_path / "p" / "0.arrow", ["a"])
    assert get_error(tmp_path, "p") == (
        f"data.sources.a.paths: {tmp_path}/p holds both *.arrow and *.parquet, perhaps the same "
        f"documents twice; name one: {tmp_path}/p/*.arrow"
    )
    assert find_names(tmp_path, "p/*.arrow") == ["p/0.arrow"]


@pytest.mark.parametrize("pattern", ["raw", "raw/*", "raw/b.jsonl.zst"])
def test_error_for_json_lines_contains_the_conversion_command(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "b.jsonl.zst").write_text("{}")
    path = tmp_path / pattern
    assert get_error(tmp_path, pattern) == (
        f"data.sources.a.paths: {path} holds b.jsonl.zst, which has no rows that can be read at "
        f"random; convert it once with `hlat prepare {path} output=DIR` and name that "
        "folder"
    )


def test_error_for_a_directory_of_text_contains_the_conversion_command(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "prepare_report.md").write_text("")
    message = get_error(tmp_path, "")
    assert "holds a.txt, which has no rows that can be read at random; convert it once" in message
    (tmp_path / "a.txt").unlink()
    assert "no file matches" in get_error(tmp_path, "")


class TestSavedDatasets:
    """Directories written by `save_to_disk` of Hugging Face datasets."""

    def save(self, folder: Path, write_arrow, names: list[str], **state: object) -> None:
        for name in names:
            write_arrow(folder / name, [name])
        files = [{"filename": name} for name in names]
        write_json(folder / "state.json", {"_data_files": files, "_split": "train", **state})
        write_json(folder / "dataset_info.json", {"features": {}})

    def test_state_lists_the_files_in_order(self, tmp_path: Path, write_arrow) -> None:
        names = ["data-9.arrow", "data-10.arrow", "data-11.arrow"]
        self.save(tmp_path / "d", write_arrow, names)
        write_arrow(tmp_path / "d" / "cache-12ab.arrow", ["derived"])
        expected = [f"d/{name}" for name in names]
        assert find_names(tmp_path, "d") == expected
        assert find_names(tmp_path, "d/data-9.arrow", "d", "d/data-11.arrow") == expected

    @pytest.mark.parametrize("key", ["_indices_files", "_indices_data_files"])
    def test_an_indices_mapping_is_refused(self, tmp_path: Path, key: str, write_arrow) -> None:
        self.save(
            tmp_path / "d", write_arrow, ["a.arrow"], **{key: [{"filename": "indices.arrow"}]}
        )
        assert f"{tmp_path}/d was saved with an indices mapping" in get_error(tmp_path, "d")

    @pytest.mark.parametrize("files", [None, [], [{}], 3])
    def test_a_state_without_files_is_refused(self, tmp_path: Path, files, write_arrow) -> None:
        self.save(tmp_path / "d", write_arrow, ["a.arrow"], _data_files=files)
        assert f"state.json of {tmp_path}/d lists no file" in get_error(tmp_path, "d")

    def test_a_missing_file_is_refused(self, tmp_path: Path, write_arrow) -> None:
        self.save(tmp_path / "d", write_arrow, ["a.arrow", "b.arrow"])
        (tmp_path / "d" / "b.arrow").unlink()
        assert "lists b.arrow, which is missing" in get_error(tmp_path, "d")

    def test_error_of_several_splits_lists_them(self, tmp_path: Path, write_arrow) -> None:
        self.save(tmp_path / "d" / "train", write_arrow, ["a.arrow"])
        write_json(tmp_path / "d" / "dataset_dict.json", {"splits": ["train", "test"]})
        assert get_error(tmp_path, "d") == (
            f"data.sources.a.paths: {tmp_path}/d is a dataset of several splits; name one: "
            f"{tmp_path}/d/train, {tmp_path}/d/test"
        )
        assert find_names(tmp_path, "d/train") == ["d/train/a.arrow"]

    @pytest.mark.parametrize("content", [3, {"splits": 3}, {"splits": [3]}, {}, None])
    def test_invalid_lists_of_splits_are_rejected(
        self, tmp_path: Path, content: object, write_arrow
    ) -> None:
        self.save(tmp_path / "d" / "train", write_arrow, ["a.arrow"])
        write_json(tmp_path / "d" / "dataset_dict.json", content)
        assert f"{tmp_path}/d/dataset_dict.json has no list of splits" in get_error(tmp_path, "d")

    def test_cache_files_of_datasets_are_excluded(self, tmp_path: Path, write_arrow) -> None:
        for name in ("wiki-train.arrow", "cache-12ab.arrow"):
            write_arrow(tmp_path / "d" / name, ["x"])
        assert find_names(tmp_path, "d") == ["d/cache-12ab.arrow", "d/wiki-train.arrow"]
        write_json(tmp_path / "d" / "dataset_info.json", {})
        assert find_names(tmp_path, "d") == ["d/wiki-train.arrow"]


class TestManifests:
    """Directories written by `hlat.prepare`."""

    def test_files_must_match_the_manifest(self, tmp_path: Path, write_arrow) -> None:
        paths = [write_arrow(tmp_path / f"{i}.arrow", ["x"]) for i in range(3)]
        files = [{"name": path.name, "bytes": path.stat().st_size, "rows": 1} for path in paths]
        write_json(tmp_path / "manifest.json", {"files": files})
        assert find_names(tmp_path, "") == ["0.arrow", "1.arrow", "2.arrow"]
        paths[0].unlink()
        paths[1].write_bytes(b"x" * 77)
        remedy = "as manifest.json beside it says; copy it again, or prepare the folder again"
        with pytest.raises(ConfigError) as error:
            find_source_files("key", str(tmp_path), [""])
        assert error.value.problems == (
            f"key: {tmp_path}/0.arrow is missing {remedy}",
            f"key: {paths[1]} has 77 bytes, not {files[1]['bytes']} {remedy}",
        )

    @pytest.mark.parametrize("manifest", [{"files": {"a": 1}}, [], {"files": 3}, "x", {}])
    def test_manifests_of_other_tools_are_ignored(
        self, tmp_path: Path, manifest, write_arrow
    ) -> None:
        write_arrow(tmp_path / "a.arrow", ["x"])
        write_json(tmp_path / "manifest.json", manifest)
        assert find_names(tmp_path, "") == ["a.arrow"]

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b'{"files": [{"name": "a.arrow", "bytes": 1e400}]}', "has a size that is not finite"),
            (b" " * (MAX_JSON_BYTES + 1), "cannot be read (it has 33,554,433 bytes, more than"),
        ],
        ids=["infinite", "huge"],
    )
    def test_infinite_sizes_and_large_manifests_are_rejected(
        self, tmp_path: Path, content: bytes, reason: str, write_arrow
    ) -> None:
        write_arrow(tmp_path / "a.arrow", ["x"])
        (tmp_path / "manifest.json").write_bytes(content)
        assert f"{tmp_path}/manifest.json {reason}" in get_error(tmp_path, "")

    def test_invalid_json_is_ignored(self, tmp_path: Path, write_arrow) -> None:
        write_arrow(tmp_path / "a.arrow", ["x"])
        (tmp_path / "manifest.json").write_bytes(b"\xff{")
        assert find_names(tmp_path, "") == ["a.arrow"]
