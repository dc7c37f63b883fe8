"""Commit and resume of a checkpoint of thousands of ranks, without the contents of its files."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.scale.simulated_ranks import SimulatedMesh, SimulatedRun
from hlat.checkpoint import (
    checkpoint_lookup,
    checkpoint_manifest,
    checkpoint_store,
    safetensors_file,
)
from hlat.storage import durable_files
from hlat.storage.durable_files import FileRecord

STEP = 1000
_FAKE_HASH = "0" * 64
_RECORDS_GATHER = 1
"""Index of the gather of `save_checkpoint` that transfers the records of slices."""


def measure_commit(run: SimulatedRun, directory: Path, check: bool) -> dict[str, Any]:
    """Save as rank 0 of all ranks; the check of the slices is optional."""
    write_file = durable_files.write_file
    seconds, sizes = {"check": 0.0}, dict[str, int]()

    def write(path: Path, blocks: Any) -> FileRecord:
        if path.suffix != ".safetensors":
            return write_file(path, blocks)
        return FileRecord(sizes[path.name], _FAKE_HASH)

    def act(rank: int, group: Any) -> Any:
        start = time.process_time()
        shards = list(run.state_shards(rank))
        saved = [c for c in shards if c.is_main_replica]
        size = sum(c.tensor.numel() * c.tensor.element_size() for c in saved)
        sizes[f"rank_{rank:05d}.safetensors"] = size
        mesh.clock.exclude_since(start)
        return checkpoint_store.save_checkpoint(directory, STEP, shards, {"data": {}}, group)

    mesh = SimulatedMesh(run, act, _RECORDS_GATHER)
    with (
        mock.patch.object(durable_files, "write_file", write),
        _time_check(seconds, check),
    ):
        path = mesh.start()
        total = mesh.clock.read()
    for name, size in sizes.items():
        with open(path / name, "xb") as file:
            file.truncate(size)
    return {
        "ranks": run.degrees.world_size,
        "layers": run.model.num_layers,
        "rank0_cpu_s": round(total, 3),
        "of_which_check_cpu_s": round(seconds["check"], 3) if check else None,
        "gathered_bytes": mesh.num_received_bytes,
        "manifest_bytes": (path / "manifest.json").stat().st_size,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


@contextmanager
def _time_check(seconds: dict[str, float], check: bool) -> Iterator[None]:
    name = "is_exact_cover" if hasattr(checkpoint_manifest, "is_exact_cover") else "is_partition"
    is_partition = getattr(checkpoint_manifest, name)

    def timed(*arguments: Any) -> bool:
        if not check:
            return True
        start = time.process_time()
        try:
            return is_partition(*arguments)
        finally:
            seconds["check"] += time.process_time() - start

    with mock.patch.object(checkpoint_manifest, name, timed):
        yield


def measure_resume(run: SimulatedRun, directory: Path, rank: int) -> dict[str, Any]:
    """Find, verify and load the checkpoint as one rank; contents of tensors are not read."""
    read: dict[str, int] = {"metadata": 0, "verified": 0, "tensors": 0}
    read_bytes, original_hash = Path.read_bytes, durable_files.hash_file

    def count_bytes(path: Path) -> bytes:
        content = read_bytes(path)
        read["metadata"] += len(content)
        return content

    def hash_file(path: Path, on_progress: Any = None) -> FileRecord:
        size = path.stat().st_size
        if path.suffix != ".safetensors":
            read["metadata"] += size
            return original_hash(path)
        read["verified"] += size
        return FileRecord(size, _FAKE_HASH)

    def read_slice(_: Any, name: str, record: Any, part: Any, tensor_slice: Any) -> torch.Tensor:
        tensor = torch.empty(tensor_slice.size, dtype=safetensors_file.DTYPES_BY_NAME[record.dtype])
        read["tensors"] += tensor.numel() * tensor.element_size()
        return tensor

    def act(rank: int, group: Any) -> float:
        shards = list(run.state_shards(rank, allocate=True))
        start = time.process_time()
        resume_checkpoint(directory, shards, group)
        return time.process_time() - start

    with (
        mock.patch.object(Path, "read_bytes", count_bytes),
        mock.patch.object(durable_files, "hash_file", hash_file),
        mock.patch.object(safetensors_file.SafetensorsReader, "_read_slice", read_slice),
    ):
        mesh = SimulatedMesh(run, act, index=-1)
        seconds = mesh.start()
        if rank:
            read.update(dict.fromkeys(read, 0))
            seconds = mesh.act_as(rank)
    return {
        "rank": rank,
        "cpu_s": round(seconds, 3),
        "metadata_bytes_read": read["metadata"],
        "verified_bytes": read["verified"],
        "tensor_bytes_read": read["tensors"],
    }


def resume_checkpoint(directory: Path, shards: list[Any], group: Any) -> None:
    """Resume as `hlat.checkpoint.resume` does."""
    newest, problems = checkpoint_lookup.find_newest_checkpoint(directory, process_group=group)
    assert newest is not None, problems
    checkpoint_store.load_shared_state(newest.path, newest.manifest, group)
    checkpoint_store.load_checkpoint(newest.path, shards, newest.manifest)
