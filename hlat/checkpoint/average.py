"""Averages the weights of checkpoints into a checkpoint of weights.

The mean of the last checkpoints of a run often does better than each of them (HLAT paper, section
V-D). It is taken in float64 and a block of rows at a time, so that it is exact to the last digit
of what is written, and needs next to no memory however large the model is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import torch

from hlat.checkpoint import durable, lookup, manifest, new_folder, places, store, tensor_file
from hlat.checkpoint.box import Box
from hlat.checkpoint.manifest import SliceRecord, TensorRecord
from hlat.checkpoint.places import Place
from hlat.config.errors import ConfigError
from hlat.config.precision import Dtype
from hlat.state import TrainingState

PLACES = ("milestones", "checkpoints")
"""Folders of a run that hold checkpoints of single steps; of a step in both, the latter counts."""

_BLOCK_ELEMENTS = 1 << 20
_FILE = "rank_00000.safetensors"
_WEIGHTS = "weights/"
_DTYPES = {tensor_file.DTYPES[dtype] for dtype in tensor_file.RECIPE_DTYPES.values()}


@dataclass(frozen=True)
class Part:
    """A checkpoint that goes into an average.

    Attributes:
        path: Its folder.
        weight: Its weight among the others.
        manifest_sha256: Hash of its manifest, which every byte of it follows from.
        tensors: Records of its weights, by name.
        state: What it holds besides tensors.
    """

    path: Place
    weight: float
    manifest_sha256: str
    tensors: Mapping[str, TensorRecord]
    state: TrainingState


def choose(run: Place, steps: Sequence[int] | None, last: int | None) -> list[Place]:
    """Find the checkpoints that a user means.

    Args:
        run: A run's folder.
        steps: The steps, or None.
        last: How many of the newest; read if there are no steps.

    Returns:
        Their folders, by step. Nothing in them was read yet.

    Raises:
        ConfigError: The run has no such checkpoints.
    """
    home = lookup.home(run)
    there = {
        step: path
        for place in PLACES
        for path in sorted(places.steps(home / place), key=str)
        if (step := store.step_of(path)) is not None
    }
    if not there:
        raise lookup.nothing_in(run)
    names = ", ".join(map(str, sorted(there)))
    if steps is None:
        assert last is not None
        if last > len(there):
            raise ConfigError(f"last={last}: {run} has only {len(there)} checkpoints: {names}")
        steps = sorted(there)[-last:]
    if missing := [step for step in steps if step not in there]:
        raise ConfigError(f"steps={missing[0]}: {run} has no such checkpoint, only {names}")
    return [there[step] for step in sorted(steps)]


def num_bytes(paths: Sequence[Place]) -> int:
    """Bytes that `read` will read.

    Raises:
        CorruptCheckpointError: One of the checkpoints is none.
    """
    files = [record for path in paths for record in store.check_files(path).files.values()]
    return sum(record.size for record in files)


def read(path: Place, weight: float, tell: Callable[[int], None]) -> Part:
    """Read a checkpoint in full, and return what an average needs of it.

    Args:
        path: Its folder.
        weight: Its weight among the others.
        tell: Hears of every further bytes that were read.

    Raises:
        CorruptCheckpointError: It is not what was written.
        ConfigError: It holds no weights, or not as this version writes them.
    """
    store.verify(path, tell)
    tensors = store.check_files(path).tensors
    weights = {name: record for name, record in tensors.items() if name.startswith(_WEIGHTS)}
    if not weights:
        raise ConfigError(f"{path} holds no weights")
    for name, record in weights.items():
        if record.dtype not in _DTYPES:
            raise ConfigError(f"{path} holds {name!r} in {record.dtype!r}, which are no weights")
    contents = store.load_state(path)
    try:
        state = TrainingState.from_json(contents)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    digest = durable.measure(path / manifest.NAME).sha256
    return Part(path, weight, digest, weights, state)


def refuse_strangers(parts: Sequence[Part], dtype: Dtype | None) -> None:
    """Return if all checkpoints are of one model, tensor by tensor.

    Args:
        parts: Two or more checkpoints.
        dtype: The dtype to write; None: that of the weights, which must then be one.

    Raises:
        ConfigError: They are not; the sentence names what differs first.
    """
    first = parts[0]
    for other in parts[1:]:
        both = f"{first.path} and {other.path}"
        one, two = first.state.fixed, other.state.fixed
        if changed := sorted(key for key in {*one, *two} if one.get(key) != two.get(key)):
            values = f"{one.get(changed[0])!r} in the first and {two.get(changed[0])!r}"
            raise ConfigError(f"{both} are not of one model: {changed[0]!r} is {values}")
        if odd := sorted(set(first.tensors) ^ set(other.tensors)):
            raise ConfigError(f"{both} are not of one model: only one of them has {odd[0]!r}")
        for name, record in first.tensors.items():
            found = other.tensors[name]
            if record.shape != found.shape:
                raise ConfigError(
                    f"{both} are not of one model: {name!r} has shape {record.shape} in the first "
                    f"and {found.shape} in the second"
                )
            if dtype is None and record.dtype != found.dtype:
                raise ConfigError(
                    f"{both} hold {name!r} in {record.dtype} and {found.dtype}; say with --dtype "
                    "which to write"
                )


def default_output(run: Place, parts: Sequence[Part], dtype: Dtype | None) -> Path:
    """Folder of an average that no other average of the run has.

    It is `averages/step_<last step>_of_<steps>` in the run's folder, with the weights behind the
    steps where they are not all the same.

    Raises:
        ConfigError: The name would be too long for a disk, or the run's folder is not on one.
    """
    if not isinstance(run, Path):
        raise ConfigError(f"an average of {run} needs a folder of this machine; give --output DIR")
    same = len({part.weight for part in parts}) == 1
    terms = [f"{part.state.step}" + ("" if same else f"x{part.weight:g}") for part in parts]
    words = [store.step_name(_newest(parts).step), "of", *terms, *([dtype.value] if dtype else [])]
    name = "_".join(words)
    if len(name) > 200:
        raise ConfigError(f"{len(parts)} checkpoints make too long a name; give --output DIR")
    return run / "averages" / name


def write(
    output: Path, parts: Sequence[Part], dtype: Dtype | None, tell: Callable[[int], None]
) -> None:
    """Write the average, and return when it would survive a power cut.

    Args:
        output: The folder; it must not exist yet. Missing parents are made.
        parts: What `read` returned, of one model.
        dtype: The dtype to write; None: that of the weights.
        tell: Hears of every further bytes that were written.

    Raises:
        ConfigError: The output exists, or there is no room for it.
        CorruptCheckpointError: A checkpoint was changed or removed since it was read.
        OSError: It could not be written. Nothing of it is left.
    """
    written = {name: _dtype(record, dtype) for name, record in parts[0].tensors.items()}
    tensors = {
        name: (record.shape, tensor_file.Computed(written[name], _blocks(parts, name, tell, dtype)))
        for name, record in parts[0].tensors.items()
    }
    entries = [
        (name, asdict(_whole(shape, values.dtype))) for name, (shape, values) in tensors.items()
    ]
    with new_folder.temporary(output) as folder:
        new_folder.refuse_full_disk(output, size(parts, dtype))
        record = durable.write(folder / _FILE, tensor_file.parts(tensors))
        state = _state(parts)
        files = [[_FILE, asdict(record), entries]]
        store.complete(folder, output.absolute(), state.step, files, state.to_json())


def size(parts: Sequence[Part], dtype: Dtype | None) -> int:
    """Bytes of weights that `write` writes."""
    records = parts[0].tensors.values()
    return sum(prod(record.shape) * _dtype(record, dtype).itemsize for record in records)


def _newest(parts: Sequence[Part]) -> TrainingState:
    return max((part.state for part in parts), key=lambda state: state.step)


def _state(parts: Sequence[Part]) -> TrainingState:
    """What the newest checkpoint says, without the place in the data; and where it comes from."""
    origins = [
        {
            "path": str(part.path),
            "step": part.state.step,
            "manifest_sha256": part.manifest_sha256,
            "weight": part.weight,
        }
        for part in parts
    ]
    return replace(_newest(parts).of_weights(), averaged_from=origins)


def _dtype(record: TensorRecord, dtype: Dtype | None) -> torch.dtype:
    if dtype is not None:
        return tensor_file.RECIPE_DTYPES[dtype]
    return tensor_file.TORCH_DTYPES[record.dtype]


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> TensorRecord:
    piece = SliceRecord((0,) * len(shape), shape, _FILE)
    return TensorRecord(shape, tensor_file.DTYPES[dtype], (piece,))


def _blocks(
    parts: Sequence[Part], name: str, tell: Callable[[int], None], dtype: Dtype | None
) -> Callable[[], Iterator[torch.Tensor]]:
    """What makes the blocks of a tensor's average."""
    record = parts[0].tensors[name]

    def blocks() -> Iterator[torch.Tensor]:
        for box in _boxes(record.shape):
            mean = _mean(parts, name, box).to(_dtype(record, dtype))
            yield mean
            tell(mean.nbytes)

    return blocks


def _boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut a tensor into whole rows, as many at a time as make a block."""
    if not prod(shape) or not shape:
        yield Box((0,) * len(shape), shape)
        return
    rows = max(1, _BLOCK_ELEMENTS // prod(shape[1:]))
    for first in range(0, shape[0], rows):
        size = (min(rows, shape[0] - first), *shape[1:])
        yield Box((first, *(0 for _ in shape[1:])), size)


def _mean(parts: Sequence[Part], name: str, box: Box) -> torch.Tensor:
    """The weighted mean of a part of a tensor, in float64."""
    total = torch.zeros(box.size, dtype=torch.float64)
    for part in parts:
        # Closed at once: a file that stays mapped keeps all that was read of it in memory
        with tensor_file.Reader(part.path) as reader:
            total.add_(reader.read(name, part.tensors[name], box), alpha=part.weight)
    return total.div_(sum(part.weight for part in parts))
