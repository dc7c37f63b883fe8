"""Records of regular slices: equal to the slices, few for any number of ranks, cheap to check."""

import itertools
import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_manifest import (
    CheckpointManifest,
    TensorRecord,
    merge_manifests,
    parse_manifest,
    serialize_manifest,
    validate_coverage,
)
from hlat.checkpoint.slice_record import SliceRecord, format_rank_file, merge_slice_records
from hlat.distributed.state_shard import StateShard
from hlat.distributed.tensor_slice import TensorSlice
from hlat.storage.durable_files import FileRecord
from tests.support.tensor_slices import is_partition


def list_single(record: SliceRecord) -> list[tuple[Any, ...]]:
    """Return offset, size and file of each slice."""
    pairs = zip(record.list_offsets().tolist(), record.list_files(), strict=True)
    return [(tuple(offset), record.size, file) for offset, file in pairs]


def shard(tp: int, dp: int, rank: int, rows: int, by_column: bool) -> SliceRecord:
    """Return the slice of a matrix with `rows` rows per tensor-parallel rank."""
    shard_rank, tp_rank = divmod(rank, tp)
    step = -(-rows // dp)
    first, last = min(shard_rank * step, rows), min((shard_rank + 1) * step, rows)
    row, column = (0, tp_rank * 4) if by_column else (tp_rank * rows, 0)
    return SliceRecord((row + first, column), (last - first, 4), format_rank_file(rank))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("rows", [32, 29])
def test_merged_records_equal_the_slices(rows: int, by_column: bool) -> None:
    records = [shard(4, 8, rank, rows, by_column) for rank in range(32)]
    by_shard = [merge_slice_records(records[start : start + 4]) for start in range(0, 32, 4)]
    merged = merge_slice_records(itertools.chain(*by_shard))
    found = sorted(itertools.chain(*map(list_single, merged)))
    assert found == sorted((one.offset, one.size, one.file) for one in records)
    assert sum(record.num_slices for record in merged) == 32
    assert len(merged) == (1 if rows == 32 else 2)
    for one in records:
        overlaps = [found for r in merged for found in r.find_overlaps(one.tensor_slice)]
        assert overlaps == ([one] if one.numel else [])


def test_the_number_of_records_does_not_depend_on_the_number_of_ranks() -> None:
    for tp, dp in ((2, 4), (8, 64)):
        shards = [
            merge_slice_records(shard(tp, dp, start + i, dp * 2, False) for i in range(tp))
            for start in range(0, tp * dp, tp)
        ]
        assert len(merge_slice_records(itertools.chain(*shards))) == 1


def test_a_file_with_another_name_has_a_separate_record() -> None:
    records = [SliceRecord((i,), (1,), name) for i, name in enumerate(("a", "b", "c"))]
    assert merge_slice_records(records) == tuple(records)


def test_the_check_of_slices_compares_no_pairs() -> None:
    count, intersect = 0, TensorSlice.intersect

    def counted(first: TensorSlice, second: TensorSlice) -> TensorSlice | None:
        nonlocal count
        count += 1
        return intersect(first, second)

    slices = [TensorSlice((i, 0), (1, 4)) for i in range(512)]
    with mock.patch.object(TensorSlice, "intersect", counted):
        assert is_partition(slices, (512, 4))
        assert not is_partition([*slices[:-1], slices[0]], (512, 4))
    assert count <= 2 * len(slices)


def test_the_check_equals_a_count_of_each_element() -> None:
    generator = np.random.default_rng(0)
    outcomes = set()
    for _ in range(400):
        slices = []
        for row in range(0, 4, 2):
            column = int(generator.integers(1, 4))
            slices += [
                TensorSlice((row, 0), (2, column)),
                TensorSlice((row, column), (2, 4 - column)),
            ]
        if generator.random() < 0.5:  # move one slice
            moved = slices.pop()
            slices.append(TensorSlice((int(generator.integers(3)), moved.offset[1]), moved.size))
        counts = np.zeros((4, 4), int)
        for part in slices:
            counts[part.index_in(TensorSlice((0, 0), (4, 4)))] += 1
        outcomes.add(bool((counts == 1).all()))
        assert is_partition(slices, (4, 4)) is bool((counts == 1).all())
    assert outcomes == {False, True}


def build_manifest(num_ranks: int) -> CheckpointManifest:
    parts = [
        CheckpointManifest(
            7,
            {format_rank_file(rank): FileRecord(8, "aa")},
            {"w": TensorRecord((num_ranks, 2), "F32", (SliceRecord((rank, 0), (1, 2), format_rank_file(rank)),))},
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    return merge_manifests(parts)


def test_the_manifest_has_one_record_for_all_ranks() -> None:
    manifest = build_manifest(64)
    validate_coverage(manifest)
    assert len(json.loads(serialize_manifest(manifest))["tensors"]["w"]["slices"]) == 1
    assert parse_manifest(serialize_manifest(manifest)) == manifest


def test_a_manifest_of_format_1_is_read() -> None:
    slices = [{"offset": [2 * i, 0], "size": [2, 2], "file": format_rank_file(i)} for i in range(2)]
    files = {format_rank_file(i): {"size": 16, "sha256": "aa"} for i in range(2)}
    tensors = {"w": {"shape": [4, 2], "dtype": "F32", "slices": slices}}
    document = {"format": 1, "step": 7, "files": files, "tensors": tensors}
    manifest = parse_manifest(json.dumps(document).encode())
    assert [one.file for one in manifest.tensors["w"].slices] == [*files]
    validate_coverage(manifest)


@pytest.mark.parametrize(
    "axes",
    [
        [[3, [1, 0], 1]],
        [[10**12, [0, 0], 1]],
        [[4, [2, 0], 1]],
        [[4, [1, 0], 2]],
        [[4, [1, 0], 0]],
        [[4, [1], 1]],
        [[4, [1, 0.5], 1]],
        [[-4, [-1, 0], -1]],
        [[4, [1, 0]]],
        4,
    ],
)
def test_invalid_axes_are_rejected(axes: Any) -> None:
    document = json.loads(serialize_manifest(build_manifest(4)))
    document["tensors"]["w"]["slices"][0]["axes"] = axes
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(json.dumps(document).encode())


def test_a_checkpoint_of_many_ranks_is_read_by_one(tmp_path: Any) -> None:
    """Write the part of each rank as the store does, and read all parts in one process."""
    values = torch.arange(24.0).view(12, 2)
    directory = tmp_path / ".tmp-step_00000007"
    directory.mkdir()
    parts = []
    for rank in range(6):
        rows = values[rank * 2 : rank * 2 + 2]
        shard = StateShard("w", (12, 2), (rank * 2, 0), (2, 2), rows)
        parts.append(checkpoint_store._write_shards(directory, rank, 7, [shard]))
    manifest = merge_manifests([CheckpointManifest.from_json(part) for part in parts if part])
    target = tmp_path / "step_00000007"
    checkpoint_store.commit_checkpoint(directory, target, manifest, {})
    checkpoint_store.verify_checkpoint(target)
    found = torch.zeros(12, 2)
    checkpoint_store.load_checkpoint(target, [StateShard("w", (12, 2), (0, 0), (12, 2), found)])
    assert torch.equal(found, values)
