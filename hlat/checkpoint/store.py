"""The checkpoint store: save, restore and verify the state of a run under any layout.

A checkpoint is a folder that appears at once, complete, by a rename or its last file, and is never
changed after it. Every byte in it is covered by a hash that leads back to the marker `COMMITTED`,
and nothing in it can hold code. So a kill at any moment, a full disk or a damaged file cost at most
one checkpoint, and never silently:

    step_00001000/
      rank_00000.safetensors    slices of tensors, one file per process that has any to save
      state.json                what the caller passed: step, data state, ...
      manifest.json             size and hash of each file; shape, dtype and slices of each tensor
      COMMITTED                 hash of manifest.json
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from hlat.checkpoint import durable, places, tensor_file
from hlat.checkpoint.box import Box
from hlat.checkpoint.chunk import Chunk
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.manifest import MARKER as _MARKER
from hlat.checkpoint.manifest import NAME as _MANIFEST
from hlat.checkpoint.manifest import (
    FileRecord,
    Manifest,
    SliceRecord,
    TensorRecord,
    collect,
    from_json,
    slice_key,
    tensor_record,
    to_json,
)
from hlat.checkpoint.places import Place
from hlat.checkpoint.remote import UnansweredError
from hlat.config.errors import ConfigError
from hlat.parallelism.group import Alone, Group, tell, together

TEMPORARY = places.TEMPORARY
"""Beginning of the names of folders that are being written or removed."""

_STATE = "state.json"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


def save(
    folder: Place,
    step: int,
    chunks: Iterable[Chunk],
    state: dict[str, Any],
    rank: int = 0,
    everyone: Group | None = None,
) -> Place:
    """Write a checkpoint and return when it would survive a power cut.

    A valid checkpoint of this step is left as it is: a committed checkpoint never changes. A
    damaged one is kept under another name, `step_..._damaged_<n>`, where nobody takes it for a
    checkpoint.

    Args:
        folder: Folder of the run's checkpoints; made if missing.
        step: Optimizer steps that the state has seen.
        chunks: Slices of which those that are `saved` cover, over all processes, every tensor
            exactly once; their tensors are read one at a time.
        state: Everything else, as JSON knows it: string keys, lists instead of tuples. The first
            process's is written.
        rank: Number of this process.
        everyone: All processes of the run, each of which writes its own slices into the same folder
            and raises when any of them does; None: there is but this one.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It could not be written, for example because the disk is full or a store does not
            answer. Nothing of it is left that is taken for a checkpoint, and older ones are
            untouched. (If only the very last flush failed, the new checkpoint stays: it is
            complete, yet might not survive a power cut.)
        TypeError: The state holds something that JSON lacks.
        ValueError: The chunks disagree about a tensor or do not cover it, or have a dtype that
            safetensors lacks.
    """
    everyone = everyone or Alone()
    target = folder / step_name(step)
    begun = together(everyone, lambda: _begin(target) if everyone.leads else None)
    name = tell(everyone, begun[0] if everyone.leads else None)
    if name is None:
        return target
    temporary = folder / name
    try:
        parts = together(everyone, lambda: _write_slices(temporary, rank, chunks))
        together(everyone, lambda: _commit(temporary, target, step, parts, state, everyone.leads))
    except BaseException:
        if everyone.leads:
            with suppress(OSError):
                places.discard(temporary)
        raise
    return target


def restore(path: Place, chunks: Iterable[Chunk]) -> None:
    """Fill every chunk from a checkpoint, however it was sliced when it was saved.

    Values are converted to the dtype of the chunk's tensor. Tensors of the checkpoint that no chunk
    asks for are not read. Damage inside a file of tensors is found by `verify`, not here.

    Args:
        path: A checkpoint's folder.
        chunks: Slices to fill; nothing is filled unless the checkpoint has all of them.

    Raises:
        ConfigError: The checkpoint lacks a tensor or has it in another shape; all are named.
        CorruptCheckpointError: It is no committed checkpoint, or its files contradict its manifest.
        UnansweredError: The store in which it lies does not give it; true of all that read.
    """
    manifest = _committed_manifest(path)
    wanted = list(chunks)
    problems = [problem for chunk in wanted if (problem := _misfit(path, manifest, chunk))]
    if problems:
        raise ConfigError(*problems)
    with tensor_file.Reader(path) as reader, torch.no_grad():
        for chunk in wanted:
            box = Box(chunk.offset, chunk.size)
            values = reader.read(chunk.name, manifest.tensors[chunk.name], box)
            chunk.tensor.copy_(values.view(chunk.tensor.shape))


def load_state(path: Place) -> dict[str, Any]:
    """The dictionary that was passed to `save`.

    Raises:
        CorruptCheckpointError: It is no committed checkpoint, or the state was changed.
    """
    record = _committed_manifest(path).files.get(_STATE)
    content = _read(path / _STATE)
    if record != FileRecord(len(content), hashlib.sha256(content).hexdigest()):
        raise CorruptCheckpointError(f"{path / _STATE} is not what was written")
    try:
        state = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise CorruptCheckpointError(f"{path / _STATE} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path / _STATE} is not a JSON object")
    return state


def verify(
    path: Place,
    tell: Callable[[int], None] = lambda _: None,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Read a whole checkpoint and compare it with what was written.

    Args:
        path: A checkpoint's folder.
        tell: Hears of every further bytes that were read.
        rank: Number of this process among those that read its files between them.
        num_ranks: How many these are; each finds what is wrong with its own files alone, and the
            first what is missing or unknown.

    Raises:
        CorruptCheckpointError: The marker is missing, or a file is missing, unknown, shorter,
            longer or different in any bit.
    """
    manifest = check_files(path) if rank == 0 else _committed_manifest(path)
    for name, record in [*manifest.files.items()][rank::num_ranks]:
        try:
            found = durable.measure(path / name, tell)
        except UnansweredError:
            raise
        except OSError as error:
            raise CorruptCheckpointError(f"{path / name} cannot be read: {error}") from error
        if found != record:
            raise CorruptCheckpointError(
                f"{path / name} is not what was written: its sha256 is {found.sha256},"
                f" manifest.json has {record.sha256}"
            )


def check_files(path: Place) -> Manifest:
    """Compare the names and sizes of a checkpoint's files with its manifest, without reading them.

    Raises:
        CorruptCheckpointError: The marker or manifest is damaged, or a file is missing, unknown,
            shorter or longer.
    """
    manifest = _committed_manifest(path)
    if step_of(path) not in (None, manifest.step):
        raise CorruptCheckpointError(f"{path} holds step {manifest.step}")
    expected = {name: record.size for name, record in manifest.files.items()}
    found = places.sizes(path)
    for name in sorted({_MANIFEST, _MARKER, *expected} ^ set(found)):
        problem = "is unknown to manifest.json" if name in found else "is missing"
        raise CorruptCheckpointError(f"{path / name} {problem}")
    for name, size in found.items():
        if size is None:
            raise CorruptCheckpointError(f"{path / name} is not a plain file")
        if size != expected.get(name, size):
            raise CorruptCheckpointError(
                f"{path / name} has {size} bytes, manifest.json has {expected[name]}"
            )
    return manifest


def is_checkpoint(path: Place) -> bool:
    """Whether a folder claims to be a checkpoint; `verify` tells whether it is one."""
    return (path / _MARKER).exists() or step_of(path) is not None


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step_{step:08d}"


def step_of(path: Place) -> int | None:
    """The step that a folder's name stands for; None if it is no name of a checkpoint."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def unused_name(path: Place, why: str) -> str:
    """Name under which a checkpoint is kept, but not used: step_00000020_damaged_1, say."""
    number = 1
    while path.with_name(f"{path.name}_{why}_{number}").exists():
        number += 1
    return f"{path.name}_{why}_{number}"


def _begin(target: Place) -> str | None:
    """Make the folder that becomes a checkpoint and return its name; None: it is there already."""
    if places.is_taken(target):
        try:
            verify(target)
            return None
        except CorruptCheckpointError:
            places.move(target, unused_name(target, "damaged"))
    return places.begin(target).name


def _write_slices(folder: Place, rank: int, chunks: Iterable[Chunk]) -> list[Any]:
    """Write what this process saves; returns records of its file and slices, if there are any."""
    file_name = f"rank_{rank:05d}.safetensors"
    entries, tensors = [], {}
    for chunk in chunks:
        if chunk.saved:
            box = Box(chunk.offset, chunk.size)
            entries.append((chunk.name, asdict(_record(chunk, file_name))))
            tensors[slice_key(chunk.name, chunk.shape, box)] = (chunk.size, chunk.tensor)
    if not tensors:
        return []
    record = durable.write(folder / file_name, tensor_file.parts(tensors))
    return [file_name, asdict(record), entries]


def _commit(
    folder: Place,
    target: Place,
    step: int,
    parts: list[Any],
    state: dict[str, Any],
    leads: bool,
) -> None:
    """Let the first process complete the checkpoint."""
    if leads:
        complete(folder, target, step, [part for part in parts if part], state)


def complete(
    folder: Place, target: Place, step: int, written: list[Any], state: dict[str, Any]
) -> None:
    """Write what leads to every slice of the tensors, and give the folder its name.

    Args:
        folder: Where the files of tensors are, beside the target.
        target: The checkpoint's folder.
        step: Optimizer steps that the state has seen.
        written: For each file of tensors its name, its FileRecord as a dictionary, and pairs of a
            tensor's name and its TensorRecord as a dictionary.
        state: Everything else, as JSON knows it.

    Raises:
        OSError: It could not be written.
    """
    entries = [
        (name, tensor_record(record)) for _, _, records in written for name, record in records
    ]
    manifest = Manifest(step, {}, collect(entries))
    manifest.files.update({name: FileRecord(**record) for name, record, _ in written})
    manifest.files[_STATE] = durable.write(folder / _STATE, [json.dumps(state).encode()])
    manifest_record = durable.write(folder / _MANIFEST, [to_json(manifest)])
    durable.write(folder / _MARKER, [manifest_record.sha256.encode()])
    places.publish(folder, target.name)


def _record(chunk: Chunk, file: str) -> TensorRecord:
    if chunk.tensor.dtype not in tensor_file.DTYPES:
        raise ValueError(f"{chunk.name} has dtype {chunk.tensor.dtype}, which cannot be saved")
    if chunk.tensor.numel() != Box(chunk.offset, chunk.size).count:
        raise ValueError(f"{chunk.name} has {chunk.tensor.numel()} elements for size {chunk.size}")
    piece = SliceRecord(chunk.offset, chunk.size, file)
    return TensorRecord(chunk.shape, tensor_file.DTYPES[chunk.tensor.dtype], (piece,))


def _committed_manifest(path: Place) -> Manifest:
    marker = _read(path / _MARKER)
    content = _read(path / _MANIFEST)
    if marker != hashlib.sha256(content).hexdigest().encode():
        raise CorruptCheckpointError(f"{path / _MANIFEST} is not what {_MARKER} was written for")
    return from_json(content)


def _read(path: Place) -> bytes:
    try:
        return path.read_bytes()
    except UnansweredError:
        raise
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _misfit(path: Place, manifest: Manifest, chunk: Chunk) -> str | None:
    saved = manifest.tensors.get(chunk.name)
    if saved is None:
        return f"{path} has no tensor {chunk.name}; this run needs it with shape {chunk.shape}"
    if saved.shape != chunk.shape:
        return (
            f"{path} has {chunk.name} with shape {saved.shape}, this run with {chunk.shape};"
            " resume with the model that was saved"
        )
    return None
