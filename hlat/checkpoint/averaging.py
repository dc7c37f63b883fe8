"""Averages of checkpoint weights, written as checkpoints.

The mean of a run's last checkpoints often outperforms each of them (HLAT paper, section V-D). It
is computed in float64 in blocks of rows, so that it is exact to the last digit of the output dtype
and its memory does not depend on the model size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from hlat.checkpoint import (
    checkpoint_directory,
    checkpoint_lookup,
    checkpoint_store,
    safetensors_file,
)
from hlat.checkpoint.checkpoint_manifest import MANIFEST_FILE, SliceRecord, TensorRecord
from hlat.checkpoint.safetensors_file import DTYPES_BY_NAME, SAFETENSORS_DTYPES
from hlat.checkpoint.tensor_slice import TensorSlice, build_full_slice
from hlat.config.config_errors import ConfigError
from hlat.config.precision import Dtype
from hlat.precision.torch_dtypes import TORCH_DTYPES
from hlat.storage import durable_files, output_directory
from hlat.storage.storage_path import StoragePath
from hlat.training_state import TrainingState

CHECKPOINT_DIRS = ("milestones", "checkpoints")
"""Directories of a run with checkpoints of single steps; the latter overrides the former."""

_BLOCK_ELEMENTS = 1 << 20
_WEIGHTS_FILE = "rank_00000.safetensors"
_WEIGHTS_PREFIX = "weights/"
_WEIGHT_DTYPES = {SAFETENSORS_DTYPES[dtype] for dtype in TORCH_DTYPES.values()}


@dataclass(frozen=True)
class WeightedCheckpoint:
    """Checkpoint with its weight in an average.

    Attributes:
        path: Checkpoint directory.
        weight: Weight relative to the other checkpoints.
        manifest_sha256: Hash of the manifest, which identifies the contents.
        tensors: Records of the weights by name.
        state: Training state.
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
        for directory in CHECKPOINT_DIRS
        for path in sorted(checkpoint_directory.list_step_dirs(root / directory), key=str)
        if (step := checkpoint_store.parse_step(path)) is not None
    }
    if not paths:
        raise checkpoint_lookup.build_no_checkpoint_error(run_dir)
    available = ", ".join(map(str, sorted(paths)))
    if steps is None:
        assert last is not None
        if last > len(paths):
            raise ConfigError(
                f"last={last}: {run_dir} has only {len(paths)} checkpoints: {available}"
            )
        steps = sorted(paths)[-last:]
    if missing := [step for step in steps if step not in paths]:
        raise ConfigError(f"steps={missing[0]}: {run_dir} has no such checkpoint, only {available}")
    return [paths[step] for step in sorted(steps)]


def compute_num_bytes(paths: Sequence[StoragePath]) -> int:
    """Return the number of bytes that `load_weighted_checkpoint` reads.

    Raises:
        CorruptCheckpointError: If one of the checkpoints is damaged.
    """
    manifests = map(checkpoint_store.load_manifest, paths)
    return sum(record.size for manifest in manifests for record in manifest.files.values())


def load_weighted_checkpoint(
    path: StoragePath, weight: float, on_progress: Callable[[int], None]
) -> WeightedCheckpoint:
    """Verify a checkpoint and return its weight records and state.

    `on_progress` is called with the number of bytes of each read.

    Raises:
        CorruptCheckpointError: If the contents differ from what was written.
        ConfigError: If the checkpoint has no weights, or was written by another version.
    """
    checkpoint_store.verify_checkpoint(path, on_progress)
    tensors = checkpoint_store.load_manifest(path).tensors
    weights = {name: record for name, record in tensors.items() if name.startswith(_WEIGHTS_PREFIX)}
    if not weights:
        raise ConfigError(f"{path} contains no weights")
    for name, record in weights.items():
        if record.dtype not in _WEIGHT_DTYPES:
            raise ConfigError(f"{path} has {name!r} in {record.dtype!r}, not a dtype of weights")
    contents = checkpoint_store.load_state_json(path)
    try:
        state = TrainingState.from_json(contents)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    sha256 = durable_files.hash_file(path / MANIFEST_FILE).sha256
    return WeightedCheckpoint(path, weight, sha256, weights, state)


def validate_same_model(checkpoints: Sequence[WeightedCheckpoint], dtype: Dtype | None) -> None:
    """Raise ConfigError if the checkpoints are of different models.

    If no output dtype is given, all weights of a tensor must have the same dtype.
    """
    first = checkpoints[0]
    for other in checkpoints[1:]:
        paths = f"{first.path} and {other.path}"
        ours, theirs = first.state.fixed, other.state.fixed
        if changed := sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k)):
            values = f"{ours.get(changed[0])!r} in the first and {theirs.get(changed[0])!r}"
            raise ConfigError(f"{paths} are of different models: {changed[0]!r} is {values}")
        if unpaired := sorted(set(first.tensors) ^ set(other.tensors)):
            raise ConfigError(
                f"{paths} are of different models: only one of them has {unpaired[0]!r}"
            )
        for name, record in first.tensors.items():
            other_record = other.tensors[name]
            if record.shape != other_record.shape:
                raise ConfigError(
                    f"{paths} are of different models: {name!r} has shape {record.shape} in the "
                    f"first and {other_record.shape} in the second"
                )
            if dtype is None and record.dtype != other_record.dtype:
                raise ConfigError(
                    f"{paths} have {name!r} in {record.dtype} and {other_record.dtype}; set the "
                    "output dtype with dtype="
                )


def build_default_output(
    run_dir: StoragePath, checkpoints: Sequence[WeightedCheckpoint], dtype: Dtype | None
) -> Path:
    """Return `averages/step_<last step>_of_<steps>` in the run directory.

    Steps are followed by their weights unless all weights are equal.

    Raises:
        ConfigError: If the name is too long for a file system, or the run directory is remote.
    """
    if not isinstance(run_dir, Path):
        raise ConfigError(f"an average of {run_dir} needs a local directory; give output=DIR")
    equal = len({checkpoint.weight for checkpoint in checkpoints}) == 1
    terms = [f"{one.state.step}" + ("" if equal else f"x{one.weight:g}") for one in checkpoints]
    step_name = checkpoint_store.format_step_name(_find_newest_state(checkpoints).step)
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
) -> None:
    """Write the average durably.

    Args:
        output: New directory; missing parents are created.
        checkpoints: Checkpoints of one model.
        dtype: Output dtype; None selects the dtype of the weights.
        on_progress: Called with the number of bytes of each write.

    Raises:
        ConfigError: If the output exists, or the disk has too little space.
        CorruptCheckpointError: If a checkpoint was changed or removed after it was verified.
        OSError: If writing fails; the incomplete output is removed.
    """
    tensors, entries = {}, []
    for name, record in checkpoints[0].tensors.items():
        torch_dtype = _resolve_dtype(record, dtype)
        blocks = partial(_compute_blocks, checkpoints, name, torch_dtype, on_progress)
        tensors[name] = (record.shape, safetensors_file.LazyTensor(torch_dtype, blocks))
        full_slice = SliceRecord((0,) * len(record.shape), record.shape, _WEIGHTS_FILE)
        output_record = TensorRecord(record.shape, SAFETENSORS_DTYPES[torch_dtype], (full_slice,))
        entries.append((name, asdict(output_record)))
    with output_directory.create_output_directory(output) as directory:
        output_directory.validate_free_space(output, compute_average_bytes(checkpoints, dtype))
        file_record = durable_files.write_file(
            directory / _WEIGHTS_FILE, safetensors_file.serialize_tensors(tensors)
        )
        state = _build_state(checkpoints)
        records = [[_WEIGHTS_FILE, asdict(file_record), entries]]
        checkpoint_store.commit_checkpoint(
            directory, output.absolute(), state.step, records, state.to_json()
        )


def compute_average_bytes(checkpoints: Sequence[WeightedCheckpoint], dtype: Dtype | None) -> int:
    """Return the number of bytes of weights that `write_average` writes."""
    records = checkpoints[0].tensors.values()
    return sum(prod(record.shape) * _resolve_dtype(record, dtype).itemsize for record in records)


def _find_newest_state(checkpoints: Sequence[WeightedCheckpoint]) -> TrainingState:
    return max((checkpoint.state for checkpoint in checkpoints), key=lambda state: state.step)


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
    state = _find_newest_state(checkpoints).to_weights_only()
    return replace(state, averaged_from=averaged_from)


def _resolve_dtype(record: TensorRecord, dtype: Dtype | None) -> torch.dtype:
    return DTYPES_BY_NAME[record.dtype] if dtype is None else TORCH_DTYPES[dtype]


def _compute_blocks(
    checkpoints: Sequence[WeightedCheckpoint],
    name: str,
    dtype: torch.dtype,
    on_progress: Callable[[int], None],
) -> Iterator[torch.Tensor]:
    """Yield the average of a tensor in blocks of rows."""
    for tensor_slice in _split_rows(checkpoints[0].tensors[name].shape):
        mean = _compute_mean(checkpoints, name, tensor_slice).to(dtype)
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


def _compute_mean(
    checkpoints: Sequence[WeightedCheckpoint], name: str, tensor_slice: TensorSlice
) -> torch.Tensor:
    """Return the weighted mean of a slice in float64."""
    total = torch.zeros(tensor_slice.size, dtype=torch.float64)
    for checkpoint in checkpoints:
        # Closed after each read: a mapped file retains the pages that were read in memory
        with safetensors_file.SafetensorsReader(checkpoint.path) as reader:
            tensor = reader.read(name, checkpoint.tensors[name], tensor_slice)
            total.add_(tensor, alpha=checkpoint.weight)
    return total.div_(sum(checkpoint.weight for checkpoint in checkpoints))
