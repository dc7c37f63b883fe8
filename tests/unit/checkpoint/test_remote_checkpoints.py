"""Checkpoints in an object store with failed requests and short reads."""

import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.retention import prune_checkpoints, quarantine_checkpoints
from hlat.checkpoint.rollback_log import Rollback, load_rollbacks, save_rollbacks
from hlat.distributed.object_group import SingleRankGroup
from hlat.distributed.state_shard import StateShard
from hlat.storage import storage_path
from hlat.storage.remote_path import RemotePath, StorageUnavailableError
from tests.support.newest_checkpoint import find_newest_valid


class ClientError(Exception):
    """Exception of a client library, which is no OSError."""


class Bucket(MemoryFileSystem):
    """In-memory object store that records its requests and fails those in `failing`."""

    protocol = "bucket"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    requests: list[tuple[str, str, int]] = []
    failing: tuple[str, ...] = ()

    def _record(self, request: str, path: str, num_bytes: int = 0) -> None:
        name = path.rpartition("/")[2]
        self.requests.append((request, name, num_bytes))
        if request in self.failing or f"{request} {name}" in self.failing:
            raise ClientError(f"503 at {request}\nrequest id 17")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._record("ls", path)
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._record("info", path)
        return super().info(path, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        self._record("cat_file", path, end - start)
        return super().cat_file(path, start, end, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._record("open" if mode == "rb" else "create", path)
        return super()._open(path, mode, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._record("cp_file", path2)
        super().cp_file(path1, path2, **options)

    def rm_file(self, path: str) -> None:
        self._record("rm_file", path)
        super().rm_file(path)


register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture(autouse=True)
def reset_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "requests", [])
    monkeypatch.setattr(Bucket, "failing", ())
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "bucket")


@pytest.fixture
def folder() -> RemotePath:
    path = storage_path.parse_storage_path(f"bucket://{uuid.uuid4().hex}/checkpoints")
    assert isinstance(path, RemotePath)
    return path


def save(folder: RemotePath, step: int) -> RemotePath:
    values = torch.arange(4000.0).reshape(100, 40) + step
    path = checkpoint_store.save_checkpoint(
        folder, step, [StateShard("w", (100, 40), (0, 0), (100, 40), values)], {"at": step}
    )
    assert isinstance(path, RemotePath)
    return path


def fail(monkeypatch: pytest.MonkeyPatch, *requests: str) -> None:
    monkeypatch.setattr(Bucket, "failing", requests)


def names(folder: RemotePath) -> list[str]:
    return sorted(folder.list_sizes())


def test_remote_paths_have_the_methods_of_pathlib(folder: RemotePath) -> None:
    path = folder / "a.b"
    assert (path.name, path.parent, path.with_name("c")) == ("a.b", folder, folder / "c")
    assert str(path) == f"{folder}/a.b"
    assert storage_path.parse_storage_path(str(path)) == path
    assert storage_path.parse_storage_path(f"{path}/") == path
    assert (path.exists(), folder.is_dir(), folder.list_sizes()) == (False, False, {})
    path.write_blocks([b"hl", b"at"])
    assert (path.exists(), folder.is_dir(), folder.list_sizes()) == (True, True, {"a.b": 4})
    assert path.read_bytes() == b"hlat"
    assert path.list_sizes() == {}
    path.unlink()
    path.unlink()
    folder.remove()
    assert list(folder.iterdir()) == []


def test_a_name_is_never_parsed_as_a_url(folder: RemotePath) -> None:
    hostile = folder / "a::file:" / "etc"
    assert hostile.filesystem is folder.filesystem
    with pytest.raises(FileNotFoundError):
        hostile.read_bytes()
    hostile.write_blocks([b"x"])
    assert folder.filesystem.cat_file(f"{folder.path}/a::file:/etc", 0, 1) == b"x"


def test_the_marker_is_written_last(folder: RemotePath) -> None:
    save(folder, 1)
    written = [name for request, name, _ in Bucket.requests if request == "create"]
    assert written == ["rank_00000.safetensors", "state.json", "manifest.json", "COMMITTED"]


def test_the_marker_is_removed_first(folder: RemotePath) -> None:
    for step in (1, 2, 3):
        save(folder, step)
    Bucket.requests.clear()
    prune_checkpoints(folder, 1)
    removed = [name for request, name, _ in Bucket.requests if request == "rm_file"]
    assert len(removed) == 8
    assert (removed[0], removed[4]) == ("COMMITTED", "COMMITTED")
    assert names(folder) == ["step_00000003"]


def test_diverged_checkpoints_are_copied_before_removal(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(folder, step)
    fail(monkeypatch, "cp_file")
    with pytest.raises(StorageUnavailableError):
        quarantine_checkpoints(folder, after_step=1)
    checkpoint_store.verify_checkpoint(folder / "step_00000002")
    fail(monkeypatch)
    Bucket.requests.clear()
    quarantine_checkpoints(folder, after_step=1)
    copied = [name for request, name, _ in Bucket.requests if request == "cp_file"]
    assert (len(copied), copied[-1]) == (4, "COMMITTED")
    assert names(folder) == ["step_00000001", "step_00000002_diverged_1"]
    assert find_newest_valid(folder) == (folder / "step_00000001", [])
    aside = folder / "step_00000002_diverged_1"
    aside.filesystem.mv(aside.path, f"{folder.path}/kept", recursive=True)
    checkpoint_store.verify_checkpoint(folder / "kept")


@pytest.mark.parametrize("request_", ["ls", "create"])
def test_a_failed_request_raises_oserror_with_the_url(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    save(folder, 1)
    fail(monkeypatch, request_)
    with pytest.raises(OSError, match=f"{folder}.*ClientError: 503 at {request_}$"):
        save(folder, 2)
    fail(monkeypatch)
    assert find_newest_valid(folder) == (folder / "step_00000001", [])
    assert names(folder) == ["step_00000001"]


@pytest.mark.parametrize("request_", ["ls", "info", "cat_file"])
def test_a_failed_request_means_neither_missing_nor_damaged(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    path = save(folder, 1)
    (path / "state.json").filesystem.pipe_file((path / "state.json").path, b"{}")
    save(folder, 2)
    fail(monkeypatch, request_)
    with pytest.raises(StorageUnavailableError):
        find_newest_valid(folder)
    with pytest.raises(StorageUnavailableError):
        prune_checkpoints(folder, 1)
    with pytest.raises(StorageUnavailableError):
        checkpoint_store.verify_checkpoint(folder / "step_00000002")
    fail(monkeypatch)
    assert names(folder) == ["step_00000001", "step_00000002"]


def test_a_failed_read_of_tensors_is_no_damage(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(folder, 1)
    fail(monkeypatch, "cat_file rank_00000.safetensors")
    with pytest.raises(StorageUnavailableError):
        checkpoint_store.verify_checkpoint(path)
    with pytest.raises(StorageUnavailableError):
        checkpoint_store.load_checkpoint(
            path, [StateShard("w", (100, 40), (0, 0), (100, 40), torch.zeros(100, 40))]
        )
    assert checkpoint_store.load_state_json(path) == {"at": 1}


def test_an_incomplete_save_is_ignored_and_removed(folder: RemotePath) -> None:
    save(folder, 1)
    for step in (2, 3):
        path = save(folder, step)
        (path / "COMMITTED").unlink()
    (path / "rank_00007.safetensors").filesystem.pipe_file(
        (path / "rank_00007.safetensors").path, b"of an earlier world"
    )
    assert find_newest_valid(folder) == (folder / "step_00000001", [])
    assert checkpoint_store.load_state_json(save(folder, 3)) == {"at": 3}
    checkpoint_store.verify_checkpoint(folder / "step_00000003")
    prune_checkpoints(folder, 9)
    assert names(folder) == ["step_00000001", "step_00000003"]


def test_a_damaged_checkpoint_is_renamed(folder: RemotePath) -> None:
    path = save(folder, 1) / "state.json"
    path.filesystem.pipe_file(path.path, b"{}")
    checkpoint_store.verify_checkpoint(save(folder, 1))
    assert names(folder) == ["step_00000001", "step_00000001_damaged_1"]
    assert (folder / "step_00000001_damaged_1/state.json").read_bytes() == b"{}"


def test_only_the_rows_of_a_slice_are_requested(folder: RemotePath) -> None:
    path = save(folder, 1)
    values = torch.zeros(3, 10)
    Bucket.requests.clear()
    checkpoint_store.load_checkpoint(path, [StateShard("w", (100, 40), (50, 5), (3, 10), values)])
    assert torch.equal(values, torch.arange(4000.0).reshape(100, 40)[50:53, 5:15] + 1)
    fetched = [
        n for request, name, n in Bucket.requests if (request, name[:4]) == ("cat_file", "rank")
    ]
    assert fetched[0] == 8
    assert fetched[2:] == [3 * 40 * 4]


def test_remote_reads_in_blocks_equal_a_memory_mapped_file(
    folder: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hlat.checkpoint import safetensors_file
    from hlat.storage import remote_path

    monkeypatch.setattr(remote_path, "_REQUEST_BYTES", 100)
    monkeypatch.setattr(remote_path, "READ_BLOCK_BYTES", 700)
    monkeypatch.setattr(safetensors_file, "READ_BLOCK_BYTES", 700)
    generator = torch.Generator().manual_seed(0)
    state = {
        "matrix": torch.randn(30, 20, generator=generator),
        "cube": torch.randn(5, 4, 20, generator=generator).bfloat16(),
        "long": torch.arange(999),
        "flags": torch.rand(33, generator=generator) > 0.5,
        "scalar": torch.tensor(3.0),
    }
    shards = [
        StateShard(n, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t) for n, t in state.items()
    ]
    there, here = (
        checkpoint_store.save_checkpoint(folder, 1, shards, {}),
        checkpoint_store.save_checkpoint(tmp_path, 1, shards, {}),
    )
    boxes = {"matrix": ((3, 4), (26, 9)), "cube": ((1, 0, 7), (4, 4, 2)), "long": ((5,), (990,))}
    for name, (offset, size) in boxes.items():
        found = [torch.zeros(size, dtype=state[name].dtype) for _ in range(2)]
        for path, values in zip((there, here), found, strict=True):
            checkpoint_store.load_checkpoint(
                path, [StateShard(name, tuple(state[name].shape), offset, size, values)]
            )
        assert torch.equal(*found)
        cut = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        assert torch.equal(found[0], state[name][cut])
    for name, values in state.items():
        found = torch.zeros_like(values)
        shape = tuple(values.shape)
        checkpoint_store.load_checkpoint(
            there, [StateShard(name, shape, (0,) * len(shape), shape, found)]
        )
        assert torch.equal(found, values)


HEADERS = {
    "long": (2**60).to_bytes(8, "little"),
    "none": b"",
    "text": (4).to_bytes(8, "little") + b"text",
    "list": (2).to_bytes(8, "little") + b"[]",
    "deep": (10**5).to_bytes(8, "little") + b"[" * 10**5,
}
ENTRIES = {
    "offsets": '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    "beyond": '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [800, 808]}}',
    "negative": '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
    "shape": '{"w": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}',
    "dtype": '{"w": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}',
    "unknown": '{"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}',
    "number": '{"w": 3}',
    "missing": '{"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    "huge": '{"w": {"dtype": "F32", "shape": [4611686018427387904, 2], "data_offsets": [0, 8]}}',
}
HEADERS |= {
    name: len(entry).to_bytes(8, "little") + entry.encode() + bytes(8)
    for name, entry in ENTRIES.items()
}


@pytest.mark.parametrize("header", HEADERS)
def test_an_invalid_tensor_file_is_damage(folder: RemotePath, header: str) -> None:
    path = checkpoint_store.save_checkpoint(
        folder, 1, [StateShard("w", (2,), (0,), (2,), torch.ones(2))], {}
    )
    assert isinstance(path, RemotePath)
    file = path / "rank_00000.safetensors"
    file.filesystem.pipe_file(file.path, HEADERS[header])
    with pytest.raises(CorruptCheckpointError, match=str(file)):
        checkpoint_store.load_checkpoint(path, [StateShard("w", (2,), (0,), (2,), torch.zeros(2))])


def test_rollbacks_are_replaced_in_the_store(folder: RemotePath) -> None:
    rollbacks = [Rollback(3, range(4, 6)), Rollback(0, range(1, 2))]
    for count in (1, 2):
        save_rollbacks(folder, rollbacks[:count])
        assert load_rollbacks(folder, 20, SingleRankGroup(), Mock()) == rollbacks[:count]
    save(folder, 1)
    assert find_newest_valid(folder) == (folder / "step_00000001", [])
