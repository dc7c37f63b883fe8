"""Saving, loading and verification of checkpoints under any parallel layout.

A checkpoint is a directory that is published atomically, by a rename or by its last file, and not
modified afterwards. Every byte is covered by a chain of hashes that starts at the marker
`COMMITTED`, and no file can contain code. A kill, a full disk or a damaged file costs at most one
checkpoint and is always detected:

    step_00001000/
      rank_00000.safetensors    slices of tensors, one file per process that saves any
      state.json                state passed by the caller: step, data state, ...
      manifest.json             size and hash of each file; shape, dtype and slices of each tensor
      COMMITTED                 hash of manifest.json
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from hlat.checkpoint import checkpoint_directory, safetensors_file
from hlat.checkpoint.checkpoint_directory import find_unused_name, format_step_name, parse_step
from hlat.checkpoint.checkpoint_errors import (
    CorruptCheckpointError,
    parse_json_object,
    raise_as_corrupt,
)
from hlat.checkpoint.checkpoint_manifest import (
    COMMIT_MARKER,
    MANIFEST_FILE,
    CheckpointManifest,
    SliceRecord,
    TensorRecord,
    format_slice_key,
    merge_tensor_records,
    parse_manifest,
    parse_tensor_record,
    serialize_manifest,
)
from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config.config_errors import ConfigError
from hlat.parallelism.process_group import (
    ProcessGroup,
    SingleProcessGroup,
    broadcast_object,
    run_on_all,
)
from hlat.storage import durable_files, storage_path
from hlat.storage.durable_files import FileRecord
from hlat.storage.storage_path import StoragePath

_STATE_FILE = "state.json"


def save_checkpoint(
    checkpoints_dir: StoragePath,
    step: int,
    chunks: Iterable[TensorChunk],
    state: dict[str, Any],
    rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> StoragePath:
    """Write a checkpoint durably and return its directory.

    A valid checkpoint of the same step is not changed, a damaged one is renamed to
    `step_..._damaged_<n>`. Tensors are read one at a time.

    Args:
        checkpoints_dir: Directory of the run's checkpoints; created if missing.
        step: Number of optimizer steps of the state.
        chunks: Slices; those with `is_main_replica` cover every tensor exactly once over all
            processes.
        state: Remaining state as JSON types, written by rank 0.
        rank: Rank of this process.
        process_group: All processes of the run, which raise if one does; by default this one.

    Raises:
        OSError: If writing fails. Older checkpoints are unchanged and the new one is not
            published. If only the last flush fails, the new checkpoint is complete but may not
            survive a power failure.
        ValueError: If the chunks of a tensor are inconsistent, do not cover it, or have a dtype
            that safetensors does not support.
    """
    group = process_group or SingleProcessGroup()
    target = checkpoints_dir / format_step_name(step)
    names = run_on_all(group, lambda: _create_checkpoint_dir(target) if group.is_rank0 else None)
    name = broadcast_object(group, names[0] if group.is_rank0 else None)
    if name is None:
        return target
    directory = checkpoints_dir / name

    def commit() -> None:
        if group.is_rank0:
            commit_checkpoint(directory, target, step, [one for one in records if one], state)

    try:
        records = run_on_all(group, lambda: _write_chunks(directory, rank, chunks))
        run_on_all(group, commit)
    except BaseException:
        if group.is_rank0:
            with suppress(OSError):
                checkpoint_directory.remove_checkpoint(directory)
        raise
    return target


def load_checkpoint(path: StoragePath, chunks: Iterable[TensorChunk]) -> None:
    """Fill every chunk from a checkpoint, however it was sliced when it was saved.

    Values are converted to the dtype of the chunk's tensor. No chunk is filled if the checkpoint
    lacks any of them. Damage inside a file of tensors is detected by `verify_checkpoint` only.

    Raises:
        ConfigError: If tensors are missing or have other shapes; the message lists all of them.
        CorruptCheckpointError: If the checkpoint is not committed, or its files contradict its
            manifest.
        StorageUnavailableError: If a request to the store fails; raised by every reader here.
    """
    manifest, chunks = _load_committed_manifest(path), list(chunks)
    if problems := [*filter(None, (_find_mismatch(path, manifest, chunk) for chunk in chunks))]:
        raise ConfigError(*problems)
    reader = safetensors_file.SafetensorsReader(path, manifest.tensors)
    with reader, torch.no_grad():
        for chunk in chunks:
            tensor = reader.read(chunk.name, chunk.tensor_slice)
            chunk.tensor.copy_(tensor.view(chunk.tensor.shape))


def load_state_json(path: StoragePath) -> dict[str, Any]:
    """Return the state that was passed to `save_checkpoint`.

    Raises:
        CorruptCheckpointError: If the checkpoint is not committed, or the state was changed.
    """
    record = _load_committed_manifest(path).files.get(_STATE_FILE)
    content = _read_file(path / _STATE_FILE)
    if record != FileRecord(len(content), hashlib.sha256(content).hexdigest()):
        raise CorruptCheckpointError(f"{path / _STATE_FILE} differs from what was written")
    return parse_json_object(content, path / _STATE_FILE)


def verify_checkpoint(
    path: StoragePath,
    on_progress: Callable[[int], None] = lambda _: None,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Read a checkpoint completely and compare it with its hashes.

    `on_progress` is called with the bytes of each read. Each of `num_ranks` processes reads every
    `num_ranks`-th file; rank 0 also checks for missing and unknown files.

    Raises:
        CorruptCheckpointError: If the marker or a file is missing, unknown, truncated, extended or
            changed in any bit.
    """
    manifest = load_manifest(path) if rank == 0 else _load_committed_manifest(path)
    for name, expected in [*manifest.files.items()][rank::num_ranks]:
        with raise_as_corrupt(path / name):
            record = durable_files.hash_file(path / name, on_progress)
        if record != expected:
            raise CorruptCheckpointError(
                f"{path / name} differs from what was written: its sha256 is {record.sha256},"
                f" manifest.json has {expected.sha256}"
            )


def load_manifest(path: StoragePath) -> CheckpointManifest:
    """Return the manifest after comparing names and sizes of the files with it.

    Raises:
        CorruptCheckpointError: If marker, manifest, or the name or size of a file is wrong.
    """
    manifest = _load_committed_manifest(path)
    if parse_step(path) not in (None, manifest.step):
        raise CorruptCheckpointError(f"{path} contains step {manifest.step}")
    expected = {name: record.size for name, record in manifest.files.items()}
    sizes = storage_path.list_sizes(path)
    for name in sorted({MANIFEST_FILE, COMMIT_MARKER, *expected} ^ set(sizes)):
        problem = "is not listed in manifest.json" if name in sizes else "is missing"
        raise CorruptCheckpointError(f"{path / name} {problem}")
    for name, size in sizes.items():
        if size is None:
            raise CorruptCheckpointError(f"{path / name} is not a plain file")
        if size != expected.get(name, size):
            raise CorruptCheckpointError(
                f"{path / name} has {size} bytes, manifest.json has {expected[name]}"
            )
    return manifest


def is_checkpoint(path: StoragePath) -> bool:
    """Return True if a directory has a commit marker or the name of a checkpoint."""
    return (path / COMMIT_MARKER).exists() or parse_step(path) is not None


def commit_checkpoint(
    directory: StoragePath,
    target: StoragePath,
    step: int,
    file_records: list[Any],
    state: dict[str, Any],
) -> None:
    """Write state, manifest and marker, and publish the checkpoint.

    `directory`, a sibling of `target`, contains the files of tensors. `file_records` has the name
    of each of them, its FileRecord as a dictionary, and pairs of a tensor name and a TensorRecord
    as a dictionary.
    """
    tensors = merge_tensor_records(
        (name, parse_tensor_record(record))
        for _, _, tensor_records in file_records
        for name, record in tensor_records
    )
    files = {name: FileRecord(**record) for name, record, _ in file_records}
    content = json.dumps(state).encode()
    files[_STATE_FILE] = durable_files.write_file(directory / _STATE_FILE, [content])
    manifest = CheckpointManifest(step, files, tensors)
    record = durable_files.write_file(directory / MANIFEST_FILE, [serialize_manifest(manifest)])
    durable_files.write_file(directory / COMMIT_MARKER, [record.sha256.encode()])
    checkpoint_directory.publish_checkpoint(directory, target.name)


def _create_checkpoint_dir(target: StoragePath) -> str | None:
    """Create the directory to write and return its name; None if a valid checkpoint exists."""
    if checkpoint_directory.has_checkpoint(target):
        try:
            verify_checkpoint(target)
            return None
        except CorruptCheckpointError:
            checkpoint_directory.rename_checkpoint(target, find_unused_name(target, "damaged"))
    return checkpoint_directory.create_checkpoint_dir(target).name


def _write_chunks(directory: StoragePath, rank: int, chunks: Iterable[TensorChunk]) -> list[Any]:
    """Write the chunks that this process saves and return their entry of `file_records`, if any."""
    file_name = f"rank_{rank:05d}.safetensors"
    tensor_records, tensors = [], {}
    for chunk in (chunk for chunk in chunks if chunk.is_main_replica):
        tensor_records.append((chunk.name, asdict(_build_tensor_record(chunk, file_name))))
        key = format_slice_key(chunk.name, chunk.shape, chunk.tensor_slice)
        tensors[key] = (chunk.size, chunk.tensor)
    if not tensors:
        return []
    blocks = safetensors_file.serialize_tensors(tensors)
    record = durable_files.write_file(directory / file_name, blocks)
    return [file_name, asdict(record), tensor_records]


def _build_tensor_record(chunk: TensorChunk, file: str) -> TensorRecord:
    dtype = safetensors_file.SAFETENSORS_DTYPES.get(chunk.tensor.dtype)
    if dtype is None:
        raise ValueError(f"{chunk.name} has dtype {chunk.tensor.dtype}, which cannot be saved")
    if chunk.tensor.numel() != chunk.tensor_slice.numel:
        raise ValueError(f"{chunk.name} has {chunk.tensor.numel()} elements for size {chunk.size}")
    return TensorRecord(chunk.shape, dtype, (SliceRecord(chunk.offset, chunk.size, file),))


def _load_committed_manifest(path: StoragePath) -> CheckpointManifest:
    marker = _read_file(path / COMMIT_MARKER)
    content = _read_file(path / MANIFEST_FILE)
    if marker != hashlib.sha256(content).hexdigest().encode():
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} does not match {COMMIT_MARKER}")
    return parse_manifest(content)


def _read_file(path: StoragePath) -> bytes:
    with raise_as_corrupt(path):
        return path.read_bytes()


def _find_mismatch(
    path: StoragePath, manifest: CheckpointManifest, chunk: TensorChunk
) -> str | None:
    record = manifest.tensors.get(chunk.name)
    if record is None:
        return f"{path} has no tensor {chunk.name}; this run needs it with shape {chunk.shape}"
    if record.shape != chunk.shape:
        return (
            f"{path} has {chunk.name} with shape {record.shape}, this run with {chunk.shape};"
            " resume with the model that was saved"
        )
    return None
