"""Serialization of manifests, and rejection of invalid ones."""

import json

import pytest

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_manifest import (
    CheckpointManifest,
    FileRecord,
    TensorRecord,
    format_slice_key,
    merge_manifests,
    parse_manifest,
    serialize_manifest,
    validate_coverage,
)
from hlat.checkpoint.slice_record import SliceRecord
from hlat.distributed.tensor_slice import TensorSlice


def half(begin: int, file: str, dtype: str = "F32") -> TensorRecord:
    return TensorRecord((4, 2), dtype, (SliceRecord((begin, 0), (2, 2), file),))


def merge(*records: TensorRecord) -> dict[str, TensorRecord]:
    parts = [CheckpointManifest(7, {}, {"w": record}) for record in records]
    manifest = merge_manifests(parts)
    validate_coverage(manifest)
    return manifest.tensors


MANIFEST = CheckpointManifest(
    7,
    {
        "rank_00000.safetensors": FileRecord(16, "aa"),
        "rank_00001.safetensors": FileRecord(16, "bb"),
    },
    merge(half(0, "rank_00000.safetensors"), half(2, "rank_00001.safetensors")),
)


def test_slices_of_many_files_are_merged_to_one_tensor() -> None:
    (record,) = MANIFEST.tensors["w"].slices
    assert record.list_files() == ["rank_00000.safetensors", "rank_00001.safetensors"]


def test_json_round_trip() -> None:
    assert parse_manifest(serialize_manifest(MANIFEST)) == MANIFEST


def test_keys_of_slices_and_full_tensors() -> None:
    assert format_slice_key("w", (4, 2), TensorSlice((0, 0), (4, 2))) == "w"
    assert format_slice_key("w", (4, 2), TensorSlice((2, 0), (2, 2))) == "w@2,0"


def test_contradictory_entries_are_rejected() -> None:
    with pytest.raises(ValueError, match="w has chunks of shape"):
        merge(half(0, "a"), half(2, "b", dtype="BF16"))
    with pytest.raises(ValueError, match="do not cover"):
        merge(half(0, "a"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 1, "step": 1, "files": [], "tensors": {}}',
        b'{"format": 1, "step": 1, "files": {"a": {}}, "tensors": {}}',
        b'{"format": 1, "step": 1, "files": {"../a": {"size": 1, "sha256": ""}}, "tensors": {}}',
        b'{"format": 1, "step": 1, "files": {"/a": {"size": 1, "sha256": ""}}, "tensors": {}}',
    ],
)
def test_invalid_documents_are_rejected(content: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(content)


def test_slices_beyond_the_size_of_a_file_are_rejected() -> None:
    document = json.loads(serialize_manifest(MANIFEST))
    document["files"]["rank_00001.safetensors"]["size"] = 15
    with pytest.raises(
        CorruptCheckpointError, match=r"assigns more bytes to rank_00001\.safetensors"
    ):
        parse_manifest(json.dumps(document).encode())


def test_an_unknown_format_is_rejected_with_its_number() -> None:
    document = {**json.loads(serialize_manifest(MANIFEST)), "format": 3}
    with pytest.raises(CorruptCheckpointError, match="format 3; this version reads 1 and 2"):
        parse_manifest(json.dumps(document).encode())


INVALID_FIELDS = [
    ("shape", [4, 3], "invalid shape or slices of w"),
    ("shape", [2, 2], "invalid shape or slices of w"),
    ("shape", [4], "invalid shape or slices of w"),
    ("shape", [4, -2], "invalid shape or slices of w"),
    ("shape", [4, 2.0], "invalid shape or slices of w"),
    ("shape", ["4", 2], "invalid shape or slices of w"),
    ("shape", None, "is invalid"),
    ("dtype", ["F32"], "is invalid"),
]


@pytest.mark.parametrize(("field", "value", "message"), INVALID_FIELDS)
def test_invalid_tensors_are_rejected(field: str, value: object, message: str) -> None:
    document = json.loads(serialize_manifest(MANIFEST))
    document["tensors"]["w"][field] = value
    with pytest.raises(CorruptCheckpointError, match=message):
        parse_manifest(json.dumps(document).encode())


def test_a_tensor_larger_than_its_files_is_rejected_before_allocation() -> None:
    document = json.loads(serialize_manifest(MANIFEST))
    piece = {"offset": [0], "size": [10**15], "file": "rank_00000.safetensors"}
    document["tensors"]["w"] |= {"shape": [10**15], "slices": [piece]}
    with pytest.raises(CorruptCheckpointError, match="than the file has"):
        parse_manifest(json.dumps(document).encode())


def test_invalid_names_and_sizes_are_rejected() -> None:
    document = json.loads(serialize_manifest(MANIFEST))
    document["tensors"]["\x1b[2J"] = document["tensors"]["w"]
    with pytest.raises(CorruptCheckpointError, match="an invalid tensor name"):
        parse_manifest(json.dumps(document).encode())
    document = json.loads(serialize_manifest(MANIFEST))
    document["files"]["rank_00000.safetensors"]["size"] = "10"
    with pytest.raises(CorruptCheckpointError, match="not a size and a hash"):
        parse_manifest(json.dumps(document).encode())


def test_a_slice_in_an_unlisted_file_is_rejected() -> None:
    document = json.loads(serialize_manifest(MANIFEST))
    document["tensors"]["w"]["slices"][0]["file"] = "/etc/passwd"
    with pytest.raises(CorruptCheckpointError, match="which it does not list"):
        parse_manifest(json.dumps(document).encode())


def test_equal_tensors_of_manifests_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints of a run differ in their step, hashes and the size of their state."""
    parsed = []
    from_json = TensorRecord.from_json
    count = lambda record: parsed.append(record) or from_json(record)  # noqa: E731
    monkeypatch.setattr(TensorRecord, "from_json", staticmethod(count))
    for step in range(5):
        files = {**MANIFEST.files, "state.json": FileRecord(100 + step, f"{step:x}")}
        manifest = CheckpointManifest(step, files, MANIFEST.tensors)
        assert parse_manifest(serialize_manifest(manifest)) == manifest
    assert len(parsed) == 1


@pytest.mark.parametrize("change", ["smaller", "missing"])
def test_equal_tensors_are_compared_with_the_files_of_each_manifest(change: str) -> None:
    parse_manifest(serialize_manifest(MANIFEST))
    files = {**MANIFEST.files, "rank_00001.safetensors": FileRecord(15, "bb")}
    message = "assigns more bytes to rank_00001.safetensors than the file has"
    if change == "missing":
        del files["rank_00001.safetensors"]
        files["other"] = FileRecord(16, "bb")
        message = "refers to 'rank_00001.safetensors', which it does not list"
    manifest = CheckpointManifest(7, files, MANIFEST.tensors)
    with pytest.raises(CorruptCheckpointError, match=message):
        parse_manifest(serialize_manifest(manifest))
