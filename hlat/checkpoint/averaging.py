"""Averages of checkpoint weights, written as checkpoints.

The mean of a run's last checkpoints often outperforms each of them (HLAT paper, section V-D). It
is computed in float64 in blocks of rows, so that it is exact to the last digit of the output dtype
and its memory does not depend on the model size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from hlat.checkpoint import (
    checkpoint_directory,
    checkpoint_lookup,
    checkpoint_store,
    safetensors_file,
    training_checkpoint,
)
from hlat.checkpoint.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest, TensorRecord
from hlat.checkpoint.checkpoint_signature import Signer
from hlat.checkpoint.safetensors_file import DTYPES_BY_NAME, SAFETENSORS_DTYPES
from hlat.checkpoint.training_state import TrainingState
from hlat.config.config_errors import ConfigError
from hlat.config.precision import Dtype
from hlat.distributed.state_shard import BUFFERS
from hlat.distributed.tensor_slice import TensorSlice, build_full_slice
from hlat.precision.torch_dtypes import TORCH_DTYPES
from hlat.storage import durable_files, output_directory
from hlat.storage.storage_path import StoragePath

_BLOCK_ELEMENTS = 1 << 20
_WEIGHTS_FILE = "rank_00000.safetensors"
_WEIGHTS_PREFIX, _BUFFERS_PREFIX = "weights/", f"{BUFFERS}/"
_PREFIXES = (_WEIGHTS_PREFIX, _BUFFERS_PREFIX)
"""Kinds of state that are averaged."""
_WEIGHT_DTYPES = {SAFETENSORS_DTYPES[dtype] for dtype in TORCH_DTYPES.values()}


@dataclass(frozen=True)
class WeightedCheckpoint:
    """Checkpoint with its weight relative to the others, its records of weights, and its state.

    `manifest_sha256` identifies the contents.
    """

    path: StoragePath
    weight: float
    manifest_sha256: str
    tensors: Mapping[str, TensorRecord]
    state: TrainingState


def select_checkpoints(
    run_dir: StoragePath, steps: Sequence[int] | None, last: int | None
) -> list[StoragePath]:
    """Return the directories of `steps`, or of the `last` newest checkpoints, sorted by step.

    Raises:
        ConfigError: If the run lacks one of the checkpoints.
    """
    root = checkpoint_lookup.find_checkpoint_root(run_dir)
    paths = {
        step: path
        for directory in ("milestones", "checkpoints")  # the latter overrides the former
        for step, path in checkpoint_directory.list_steps(root / directory).items()
    }
    if not paths:
        raise checkpoint_lookup.build_no_checkpoint_error(run_dir)
    available = ", ".join(map(str, sorted(paths)))
    if last is not None and last > len(paths):
        raise ConfigError(f"last={last}: {run_dir} has only {len(paths)} checkpoints: {available}")
    steps = steps or sorted(paths)[-(last or 0) :]
    if missing := [step for step in steps if step not in paths]:
        raise ConfigError(f"steps={missing[0]}: {run_dir} has no such checkpoint, only {available}")
    return [paths[step] for step in sorted(steps)]


def compute_num_bytes(paths: Sequence[StoragePath]) -> int:
    """Return the number of bytes that `load_weighted_checkpoint` reads."""
    manifests = map(checkpoint_store.load_manifest, paths)
    return sum(record.size for manifest in manifests for record in manifest.files.values())


def load_weighted_checkpoint(
    path: StoragePath,
    weight: float,
    on_progress: Callable[[int], None],
    trusted_keys: str | None = None,
) -> WeightedCheckpoint:
    """Verify a checkpoint, and its signature with `trusted_keys`; return weight records and state.

    Raises:
        CorruptCheckpointError: If the contents differ from what was written.
        ConfigError: If the checkpoint has no weights, or was written by another version.
    """
    checkpoint_store.verify_checkpoint(path, on_progress, trusted_keys)
    tensors = checkpoint_store.load_manifest(path).tensors
    weights = {name: record for name, record in tensors.items() if name.startswith(_PREFIXES)}
    if not any(name.startswith(_WEIGHTS_PREFIX) for name in weights):
        raise ConfigError(f"{path} contains no weights")
    for name, record in weights.items():
        if record.dtype not in _WEIGHT_DTYPES:
            raise ConfigError(f"{path} has {name!r} in {record.dtype!r}, not a dtype of weights")
    contents = checkpoint_store.load_state_json(path)
    try:
        state = TrainingState.from_json(contents)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if training_checkpoint.find_weights_key(state, path) != training_checkpoint.WEIGHTS:
        raise ConfigError(
            f"{path} has an average of the weights of all steps, as its optimizer evaluates one; "
            "export or evaluate it without hlat average"
        )
    sha256 = durable_files.hash_file(path / MANIFEST_FILE).sha256
    return WeightedCheckpoint(path, weight, sha256, weights, state)


def validate_same_model(checkpoints: Sequence[WeightedCheckpoint], dtype: Dtype | None) -> None:
    """Raise ConfigError if the checkpoints are of different models.

    If no output dtype is given, all weights of a tensor must have the same dtype.
    """
    first = checkpoints[0]
    for other in checkpoints[1:]:
        paths = f"{first.path} and {other.path}"
        shapes, dtypes = (
            [{name: getattr(t, key) for name, t in one.tensors.items()} for one in (first, other)]
            for key in ("shape", "dtype")
        )
        for pair in ((first.state.fixed, other.state.fixed), shapes):
            if difference := _find_difference(*pair):
                raise ConfigError(f"{paths} are of different models: {difference}")
        if dtype is None and (difference := _find_difference(*dtypes)):
            raise ConfigError(
                f"{paths} have different dtypes: {difference}; set the output dtype with dtype="
            )


def build_default_output(
    run_dir: StoragePath, checkpoints: Sequence[WeightedCheckpoint], dtype: Dtype | None
) -> Path:
    """Return `averages/step_<last step>_of_<steps>[x<weight>]` in the run directory.

    Raises:
        ConfigError: If the name is too long for a file system, or the run directory is remote.
    """
    if not isinstance(run_dir, Path):
        raise ConfigError(f"an average of {run_dir} needs a local directory; give output=DIR")
    equal = len({checkpoint.weight for checkpoint in checkpoints}) == 1
    terms = [f"{one.state.step}" + ("" if equal else f"x{one.weight:g}") for one in checkpoints]
    step_name = checkpoint_directory.format_step_name(checkpoints[-1].state.step)
    name = "_".join([step_name, "of", *terms, *([dtype.value] if dtype else [])])
    if len(name) > 200:
        raise ConfigError(
            f"the default name for {len(checkpoints)} checkpoints is too long; give output=DIR"
        )
    return run_dir / "averages" / name


def write_average(
    output: Path,
    checkpoints: Sequence[WeightedCheckpoint],
    dtype: Dtype | None,
    on_progress: Callable[[int], None],
    sign: Signer | None = None,
) -> None:
    """Write the average of checkpoints of one model, sorted by step, durably to a new directory.

    Without `dtype` the weights keep theirs. `on_progress` is called with the bytes of each write.
    With `sign`, the average is signed.

    Raises:
        ConfigError: If the output exists, or the disk has too little space.
        CorruptCheckpointError: If a checkpoint was changed or removed after it was verified.
        OSError: If writing fails; the incomplete output is removed.
    """
    tensors, records = {}, {}
    for name, record in checkpoints[0].tensors.items():
        torch_dtype = _resolve_dtype(name, record, dtype)
        blocks = partial(_compute_blocks, checkpoints, name, torch_dtype, on_progress)
        tensors[name] = (record.shape, safetensors_file.LazyTensor(torch_dtype, blocks))
        dtype_name = SAFETENSORS_DTYPES[torch_dtype]
        records[name] = TensorRecord.from_single_file(record.shape, dtype_name, _WEIGHTS_FILE)
    with output_directory.create_output_directory(output) as directory:
        output_directory.validate_free_space(output, compute_average_bytes(checkpoints, dtype))
        file_record = durable_files.write_file(
            directory / _WEIGHTS_FILE, safetensors_file.serialize_tensors(tensors)
        )
        state = _build_state(checkpoints)
        manifest = CheckpointManifest(state.step, {_WEIGHTS_FILE: file_record}, records)
        target = output.absolute()
        checkpoint_store.commit_checkpoint(directory, target, manifest, state.to_json(), sign)


def _find_difference(first: Mapping[str, object], second: Mapping[str, object]) -> str | None:
    differences = (
        f"{key!r} is {first.get(key)!r} in the first and {second.get(key)!r} in the second"
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
    )
    return next(differences, None)


def compute_average_bytes(checkpoints: Sequence[WeightedCheckpoint], dtype: Dtype | None) -> int:
    """Return the number of bytes of weights that `write_average` writes."""
    records = checkpoints[0].tensors.items()
    return sum(
        prod(record.shape) * _resolve_dtype(name, record, dtype).itemsize
        for name, record in records
    )


def _build_state(checkpoints: Sequence[WeightedCheckpoint]) -> TrainingState:
    """Return the newest state without the position in the data, with the averaged checkpoints."""
    averaged_from = [
        {
            "path": str(checkpoint.path),
            "step": checkpoint.state.step,
            "manifest_sha256": checkpoint.manifest_sha256,
            "weight": checkpoint.weight,
        }
        for checkpoint in checkpoints
    ]
    state = checkpoints[-1].state.to_weights_only()
    return replace(state, averaged_from=averaged_from)


def _resolve_dtype(name: str, record: TensorRecord, dtype: Dtype | None) -> torch.dtype:
    """Return the output dtype of a tensor; that of buffers does not change."""
    if dtype is None or name.startswith(_BUFFERS_PREFIX):
        return DTYPES_BY_NAME[record.dtype]
    return TORCH_DTYPES[dtype]


def _compute_blocks(
    checkpoints: Sequence[WeightedCheckpoint],
    name: str,
    dtype: torch.dtype,
    on_progress: Callable[[int], None],
) -> Iterator[torch.Tensor]:
    """Yield the weighted mean of a tensor, computed in float64, in blocks of rows."""
    for tensor_slice in _split_rows(checkpoints[0].tensors[name].shape):
        total = torch.zeros(tensor_slice.size, dtype=torch.float64)
        for checkpoint in checkpoints:
            # Closed after each read: a mapped file retains the pages that were read in memory
            with safetensors_file.SafetensorsReader(checkpoint.path, checkpoint.tensors) as reader:
                total.add_(reader.read(name, tensor_slice), alpha=checkpoint.weight)
        mean = total.div_(sum(checkpoint.weight for checkpoint in checkpoints)).to(dtype)
        yield mean
        on_progress(mean.nbytes)


def _split_rows(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """Yield slices of complete rows with about `_BLOCK_ELEMENTS` elements."""
    if not prod(shape) or not shape:
        yield build_full_slice(shape)
        return
    num_rows = max(1, _BLOCK_ELEMENTS // prod(shape[1:]))
    for first in range(0, shape[0], num_rows):
        size = (min(num_rows, shape[0] - first), *shape[1:])
        yield TensorSlice((first, *(0 for _ in shape[1:])), size)
