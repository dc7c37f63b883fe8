"""Saving, loading and verification of checkpoints under any parallel layout.

A checkpoint is a directory that is published atomically, by a rename or by its last file, and not
modified afterwards. Every byte is covered by a chain of hashes that starts at the marker
`COMMITTED`, and no file can contain code. A kill, a full disk or a damaged file costs at most one
checkpoint and is always detected:

    step_00001000/
      rank_00000.safetensors    slices of tensors, one file per process that saves any
      state.json                state passed by the caller: step, data state, ...
      manifest.json             size and hash of each file; shape, dtype and slices of each tensor
      COMMITTED.sig             signature of the content of COMMITTED, if the run signs
      COMMITTED                 hash of manifest.json
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from hlat.checkpoint import checkpoint_directory, checkpoint_signature, safetensors_file
from hlat.checkpoint.checkpoint_directory import find_unused_name, format_step_name, parse_step
from hlat.checkpoint.checkpoint_errors import (
    CorruptCheckpointError,
    parse_json_object,
    raise_as_corrupt,
)
from hlat.checkpoint.checkpoint_manifest import (
    COMMIT_MARKER,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    CheckpointManifest,
    TensorRecord,
    format_slice_key,
    merge_manifests,
    merge_manifests_json,
    parse_manifest,
    serialize_manifest,
    validate_coverage,
)
from hlat.checkpoint.checkpoint_signature import Signer
from hlat.checkpoint.slice_record import SliceRecord, format_rank_file
from hlat.config.config_errors import raise_config_errors
from hlat.distributed.object_group import (
    ObjectGroup,
    SingleRankGroup,
    run_and_reduce,
    run_on_all,
    run_on_rank0,
)
from hlat.distributed.state_shard import StateShard
from hlat.storage import durable_files, storage_path
from hlat.storage.durable_files import FileRecord
from hlat.storage.storage_path import StoragePath

_STATE_FILE = "state.json"
_NO_RECORDS: dict[str, Any] = {"files": {}, "tensors": {}}
"""Records of a rank that saves no tensor."""


def save_checkpoint(
    checkpoints_dir: StoragePath,
    step: int,
    shards: Iterable[StateShard],
    state: dict[str, Any],
    process_group: ObjectGroup | None = None,
    sign: Signer | None = None,
) -> StoragePath:
    """Write a checkpoint durably and return its directory.

    A valid checkpoint of the same step is not changed, a damaged one, or one without the signature
    of `sign`, is renamed to `step_..._damaged_<n>`. Tensors are read one at a time.

    Args:
        checkpoints_dir: Directory of the run's checkpoints; created if missing.
        step: Number of optimizer steps of the state.
        shards: Slices; those with `is_main_replica` cover every tensor exactly once over all
            processes.
        state: Remaining state as JSON types, written by rank 0.
        process_group: All processes of the run, which raise if one does; by default this one.
        sign: Signs the marker on rank 0; by default the checkpoint has no signature.

    Raises:
        OSError: If writing fails. Older checkpoints are unchanged and the new one is not
            published. If only the last flush fails, the new checkpoint is complete but may not
            survive a power failure.
        ValueError: If the shards of a tensor are inconsistent, do not cover it, or have a dtype
            that safetensors does not support.
    """
    group = process_group or SingleRankGroup()
    target = checkpoints_dir / format_step_name(step)
    name = run_on_rank0(group, lambda: _create_checkpoint_dir(target, sign))
    if name is None:
        return target
    directory = checkpoints_dir / name

    def commit(document: Any) -> None:
        if group.is_rank0:
            saved = CheckpointManifest.from_json(document or {"step": step, **_NO_RECORDS})
            commit_checkpoint(directory, target, saved, state, sign)

    try:
        document = run_and_reduce(
            group, lambda: _write_shards(directory, group.rank, step, shards), merge_manifests_json
        )
        run_on_all(group, lambda: commit(document))
    except BaseException:
        if group.is_rank0:
            with suppress(OSError):
                checkpoint_directory.remove_checkpoint(directory)
        raise
    return target


def load_checkpoint(
    path: StoragePath, shards: Iterable[StateShard], manifest: CheckpointManifest | None = None
) -> None:
    """Fill every shard from a checkpoint, however it was sliced when it was saved.

    `manifest` is that of the checkpoint if it was read already. Values are converted to the dtype
    of the shard's tensor. No shard is filled if the checkpoint lacks any of them. Damage inside a
    file of tensors is detected by `verify_checkpoint` only.

    Raises:
        ConfigError: If tensors are missing or have other shapes; the message lists all of them.
        CorruptCheckpointError: If the checkpoint is not committed, or its files contradict its
            manifest.
        StorageUnavailableError: If a request to the store fails; raised by every reader here.
    """
    manifest, shards = manifest or _load_committed_manifest(path), list(shards)
    raise_config_errors(filter(None, (_find_mismatch(path, manifest, shard) for shard in shards)))
    reader = safetensors_file.SafetensorsReader(path, manifest.tensors)
    with reader, torch.no_grad():
        for shard in shards:
            tensor = reader.read(shard.name, shard.tensor_slice)
            shard.tensor.copy_(tensor.view(shard.tensor.shape))


def load_state_json(
    path: StoragePath, manifest: CheckpointManifest | None = None
) -> dict[str, Any]:
    """Return the state that was passed to `save_checkpoint`.

    `manifest` is that of the checkpoint if it was read already.

    Raises:
        CorruptCheckpointError: If the checkpoint is not committed, or the state was changed.
    """
    manifest = manifest or _load_committed_manifest(path)
    return parse_json_object(_read_state(path, manifest), path / _STATE_FILE)


def load_shared_state(
    path: StoragePath, manifest: CheckpointManifest, group: ObjectGroup
) -> dict[str, Any]:
    """Return the state on all ranks of a group; rank 0 reads it.

    Raises:
        CorruptCheckpointError: On all ranks, if the state was changed.
    """
    content = _read_on_rank0(group, lambda: _read_state(path, manifest))
    return parse_json_object(content, path / _STATE_FILE)


def load_shared_manifest(
    path: StoragePath, group: ObjectGroup, trusted_keys: str | None = None
) -> CheckpointManifest:
    """Return the manifest on all ranks of a group; rank 0 reads and validates it.

    Raises:
        CorruptCheckpointError: On all ranks, as `load_manifest`.
    """
    manifest: CheckpointManifest | None = None

    def read() -> bytes:
        nonlocal manifest
        manifest = load_manifest(path, trusted_keys)
        return json.dumps(manifest.to_json()).encode()

    content = _read_on_rank0(group, read)
    return manifest or CheckpointManifest.from_json(json.loads(content))


def verify_checkpoint(
    path: StoragePath,
    on_progress: Callable[[int], None] = lambda _: None,
    trusted_keys: str | None = None,
) -> None:
    """Read a checkpoint completely and compare it with its hashes.

    `on_progress` is called with the bytes of each read. With `trusted_keys`, a file of public keys,
    the checkpoint must be signed with one of them.

    Raises:
        CorruptCheckpointError: If the marker or a file is missing, unknown, truncated, extended or
            changed in any bit, or lacks slices that the manifest lists, or the signature is missing
            or wrong.
    """
    manifest = load_manifest(path, trusted_keys)
    verify_files(path, manifest, manifest.files, on_progress)


def verify_files(
    path: StoragePath,
    manifest: CheckpointManifest,
    names: Iterable[str],
    on_progress: Callable[[int], None],
) -> None:
    """Read some files of a checkpoint and compare them with their hashes and slices.

    Raises:
        CorruptCheckpointError: If a file is missing, differs in any bit, or does not contain the
            slices that the manifest lists.
    """
    for name in names:
        expected = manifest.files[name]
        with raise_as_corrupt(path / name):
            record = durable_files.hash_file(path / name, on_progress)
        if record != expected:
            raise CorruptCheckpointError(
                f"{path / name} differs from what was written: its sha256 is {record.sha256},"
                f" manifest.json has {expected.sha256}"
            )
        with safetensors_file.SafetensorsReader(path, manifest.tensors) as reader:
            reader.validate_header(name)


def load_manifest(path: StoragePath, trusted_keys: str | None = None) -> CheckpointManifest:
    """Return the manifest after comparing names and sizes of the files with it.

    With `trusted_keys`, a file of public keys, the signature is verified first.

    Raises:
        CorruptCheckpointError: If marker, signature, manifest, or the name or size of a file is
            wrong.
    """
    if trusted_keys is not None:
        marker = _read_file(path / COMMIT_MARKER)
        checkpoint_signature.verify_signature(path, marker, trusted_keys)
    manifest = _load_committed_manifest(path)
    if parse_step(path) not in (None, manifest.step):
        raise CorruptCheckpointError(f"{path} contains step {manifest.step}")
    expected = {name: record.size for name, record in manifest.files.items()}
    sizes = storage_path.list_sizes(path)
    for name in sorted({MANIFEST_FILE, COMMIT_MARKER, *expected} ^ (set(sizes) - {SIGNATURE_FILE})):
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
    manifest: CheckpointManifest,
    state: dict[str, Any],
    sign: Signer | None = None,
) -> None:
    """Write state, manifest, signature and marker, and publish the checkpoint.

    `directory`, a sibling of `target`, contains the files of tensors that `manifest` lists.
    Without `sign`, no signature is written.

    Raises:
        ValueError: If the slices of a tensor do not cover it exactly once.
    """
    validate_coverage(manifest)
    content = json.dumps(state).encode()
    state_record = durable_files.write_file(directory / _STATE_FILE, [content])
    manifest = replace(manifest, files=manifest.files | {_STATE_FILE: state_record})
    record = durable_files.write_file(directory / MANIFEST_FILE, [serialize_manifest(manifest)])
    marker = record.sha256.encode()
    if sign is not None:
        durable_files.write_file(directory / SIGNATURE_FILE, [sign(marker)])
    durable_files.write_file(directory / COMMIT_MARKER, [marker])
    checkpoint_directory.publish_checkpoint(directory, target.name)


def sign_checkpoint(path: StoragePath, sign: Signer) -> None:
    """Write the signature of an existing checkpoint, which the caller has verified.

    Raises:
        OSError: If the file cannot be written.
    """
    signature, file = sign(_read_file(path / COMMIT_MARKER)), path / SIGNATURE_FILE
    durable_files.replace_file(file, signature, durable=True)


def _create_checkpoint_dir(target: StoragePath, sign: Signer | None) -> str | None:
    """Create the directory to write and return its name; None if a valid checkpoint exists."""
    if checkpoint_directory.has_checkpoint(target):
        try:
            verify_checkpoint(target)
            if sign is None or _has_signature(target, sign):
                return None
        except CorruptCheckpointError:
            pass
        checkpoint_directory.rename_checkpoint(target, find_unused_name(target, "damaged"))
    return checkpoint_directory.create_checkpoint_dir(target).name


def _has_signature(path: StoragePath, sign: Signer) -> bool:
    """Return True if a checkpoint has the signature that `sign` makes: Ed25519 is deterministic."""
    file = path / SIGNATURE_FILE
    return file.exists() and _read_file(file) == sign(_read_file(path / COMMIT_MARKER))


def _write_shards(
    directory: StoragePath, rank: int, step: int, shards: Iterable[StateShard]
) -> dict[str, Any] | None:
    """Write the shards that this process saves; return their manifest as JSON, if any."""
    file_name = format_rank_file(rank)
    records, tensors = [], {}
    for shard in (shard for shard in shards if shard.is_main_replica):
        records.append({shard.name: _build_tensor_record(shard, file_name)})
        key = format_slice_key(shard.name, shard.shape, shard.tensor_slice)
        tensors[key] = (shard.size, shard.tensor)
    if not tensors:
        return None
    blocks = safetensors_file.serialize_tensors(tensors)
    files = {file_name: durable_files.write_file(directory / file_name, blocks)}
    parts = [CheckpointManifest(step, files, tensor_records) for tensor_records in records]
    return merge_manifests(parts).to_json()


def _build_tensor_record(shard: StateShard, file: str) -> TensorRecord:
    dtype = safetensors_file.SAFETENSORS_DTYPES.get(shard.tensor.dtype)
    if dtype is None:
        raise ValueError(f"{shard.name} has dtype {shard.tensor.dtype}, which cannot be saved")
    if shard.tensor.numel() != shard.tensor_slice.numel:
        raise ValueError(f"{shard.name} has {shard.tensor.numel()} elements for size {shard.size}")
    return TensorRecord(shard.shape, dtype, (SliceRecord(shard.offset, shard.size, file),))


def _load_committed_manifest(path: StoragePath) -> CheckpointManifest:
    marker = _read_file(path / COMMIT_MARKER)
    content = _read_file(path / MANIFEST_FILE)
    if marker != hashlib.sha256(content).hexdigest().encode():
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} does not match {COMMIT_MARKER}")
    return parse_manifest(content)


def _read_state(path: StoragePath, manifest: CheckpointManifest) -> bytes:
    content = _read_file(path / _STATE_FILE)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    if record != manifest.files.get(_STATE_FILE):
        raise CorruptCheckpointError(f"{path / _STATE_FILE} differs from what was written")
    return content


def _read_on_rank0(group: ObjectGroup, read: Callable[[], bytes]) -> bytes:
    """Return what rank 0 reads on all ranks; all raise its error."""
    content = b""

    def find_problem() -> str | None:
        nonlocal content
        try:
            content = read()
        except CorruptCheckpointError as error:
            return str(error)
        return None

    problem = run_on_rank0(group, find_problem)
    if problem is not None:
        raise CorruptCheckpointError(problem)
    return group.broadcast(content if group.is_rank0 else None)


def _read_file(path: StoragePath) -> bytes:
    with raise_as_corrupt(path):
        return path.read_bytes()


def _find_mismatch(
    path: StoragePath, manifest: CheckpointManifest, shard: StateShard
) -> str | None:
    record = manifest.tensors.get(shard.name)
    if record is None:
        return f"{path} has no tensor {shard.name}; this run needs it with shape {shard.shape}"
    if record.shape != shard.shape:
        return (
            f"{path} has {shard.name} with shape {record.shape}, this run with {shard.shape};"
            " resume with the model that was saved"
        )
    return None
