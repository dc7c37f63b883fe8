"""Every change to a prepared directory is detected."""

import json
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.prepare import corpus_manifest, input_files, preparation, preparation_source


@pytest.fixture
def folder(tmp_path: Path, make_documents) -> Path:
    """Prepare two sources."""
    for name in ("arxiv", "github"):
        (tmp_path / "in" / name).mkdir(parents=True)
        rows = [json.dumps({"text": text}) for text in make_documents(name, 20)]
        (tmp_path / "in" / name / "a.jsonl").write_text("\n".join(rows))
    found = input_files.find_input_files([str(tmp_path / "in")])
    sources, _ = preparation_source.plan_sources(tmp_path / "data", found, "text", "redpajama")
    preparation.prepare_sources(sources, 1, False, lambda _: None)
    return tmp_path / "data"


def test_complete_corpus_is_verified(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*/part-*"))
    assert corpus_manifest.verify_corpus(folder) == (size, [])
    assert corpus_manifest.verify_corpus(folder / "arxiv")[1] == []
    manifests = corpus_manifest.load_complete_manifests(folder)
    assert [one.source for one in manifests.values()] == ["arxiv", "github"]
    assert [one.layout for one in manifests.values()] == ["redpajama"] * 2


def test_all_changed_files_are_listed(folder: Path) -> None:
    flipped = folder / "arxiv/part-00000.arrow"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    truncated = folder / "github/part-00000.arrow"
    truncated.write_bytes(truncated.read_bytes()[:-1])
    (folder / "github/part-00001.arrow").write_bytes(content)
    size = truncated.stat().st_size
    assert corpus_manifest.verify_corpus(folder)[1] == [
        f"{flipped}: its bytes have changed",
        f"{truncated}: has {size:,} bytes, not {size + 1:,}",
        f"{folder}/github/part-00001.arrow: is not in the manifest, but a run that reads the directory "
        "would read it",
    ]
    flipped.unlink()
    assert corpus_manifest.verify_corpus(folder / "arxiv")[1] == [f"{flipped}: is missing"]


def test_unfinished_and_unprepared_directories_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in: it and its directories have no manifest"):
        corpus_manifest.verify_corpus(tmp_path / "in")
    with pytest.raises(ConfigError, match="no manifest"):
        corpus_manifest.verify_corpus(tmp_path / "nowhere")
    (folder / "c4" / corpus_manifest.WORK_DIR).mkdir(parents=True)
    with pytest.raises(ConfigError, match="c4: not finished; run the command that prepares"):
        corpus_manifest.verify_corpus(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "is not a manifest"), ('{"format": 9}', "has format 9, not 1"), ("[]", "is not a mani")],
)
def test_damaged_manifests_are_rejected(folder: Path, content: str, reason: str) -> None:
    (folder / "arxiv/manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=f"arxiv/manifest.json: {reason}"):
        corpus_manifest.load_complete_manifests(folder)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("bytes", "1e400", "1e400 is not a finite number"),
        ("bytes", "-1", "bytes is -1"),
        ("rows", "true", "rows is true"),
        ("name", "7", "name is 7"),
        ("sha256", "null", "sha256 is null"),
        ("rows", str(2**63), "rows is 9223372036854775808"),
    ],
)
def test_manifest_with_an_invalid_value_is_rejected(
    folder: Path, field: str, value: str, reason: str
) -> None:
    path = folder / "arxiv" / corpus_manifest.MANIFEST_FILE
    content = json.loads(path.read_bytes())
    content["files"][0][field] = "VALUE"
    path.write_text(json.dumps(content).replace('"VALUE"', value))
    with pytest.raises(ConfigError) as error:
        corpus_manifest.verify_corpus(folder)
    assert str(error.value).startswith(f"{path}: is not a manifest of hlat prepare (")
    assert reason in str(error.value)
