"""Reader of the tensors in rank files of neuronx-distributed (NxD).

NxD writes pickles with torch.save. They are read by torch.load with weights_only, which rebuilds
tensors and rejects other objects. Files are memory-mapped, so that only the used part of a rank's
weights is read.
"""

import re
from functools import lru_cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.safetensors_file import SAFETENSORS_DTYPES

_READ_ERRORS = (
    *(AssertionError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""Exceptions that torch.load raises for damaged files."""


class _TensorReference:
    """Placeholder in a rank file for a tensor that is saved in a separate file."""

    tid: int


_REFERENCE_GLOBAL = "torch_xla.utils.serialization.TensorReference"
"""Name of the placeholder's class in checkpoints saved with use_xser."""


class NxdTensorInfo(NamedTuple):
    """Shape and safetensors dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class NxdRankFiles:
    """Rank files of one checkpoint, of which at most `max_mapped` are mapped at a time.

    `max_mapped` is the number of ranks that share a parameter.
    """

    def __init__(self, directory: Path, max_mapped: int) -> None:
        self._directory = directory
        self._load_state = lru_cache(max_mapped)(partial(_load_rank_state, directory))
        self._load_separate = lru_cache(max_mapped)(partial(_load_separate_tensor, directory))

    def load_tensor_infos(self, file: str) -> dict[str, NxdTensorInfo]:
        """Return shape and dtype of the tensors of a rank by name.

        Raises:
            CorruptCheckpointError: If a file is missing or is not what NxD writes.
        """
        state = self._load_state(file)
        references = {
            key: value.tid for key, value in state.items() if isinstance(value, _TensorReference)
        }
        infos = self._load_recorded_infos(file, references) if references else {}
        rest = [key for key in state if key not in infos]
        return infos | {key: _build_tensor_info(self._load_unchecked(file, key)) for key in rest}

    def load_tensor(self, file: str, key: str, recorded: NxdTensorInfo) -> torch.Tensor:
        """Return a memory-mapped tensor of a rank.

        Raises:
            CorruptCheckpointError: If shape or dtype differ from those of `load_tensor_infos`.
        """
        tensor = self._load_unchecked(file, key)
        if _build_tensor_info(tensor) != recorded:
            raise CorruptCheckpointError(
                f"{file} has {key} as {_build_tensor_info(tensor)}, its .info.pt as {recorded}"
            )
        return tensor

    def _load_unchecked(self, file: str, key: str) -> torch.Tensor:
        value = self._load_state(file)[key]
        if isinstance(value, _TensorReference):
            return self._load_separate(f"{file}.tensors/tensor_{value.tid}.pt")
        return _validate_tensor(value, f"{file} contains {key}")

    def _load_recorded_infos(
        self, file: str, references: dict[str, int]
    ) -> dict[str, NxdTensorInfo]:
        """Return the infos of separate files, which must exist; NxD 0.6 and earlier record none."""
        name = f"{file}.tensors"
        directory = self._directory / name
        existing = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        missing = [tid for tid in references.values() if f"tensor_{tid}.pt" not in existing]
        if len(missing) == len(references):
            raise CorruptCheckpointError(
                f"{name} contains none of the {len(missing)} tensors of {file}; NxD omits them "
                "with avoid_saving_lower_precision_weights: save once without it"
            )
        if missing:
            raise CorruptCheckpointError(f"there is no {name}/tensor_{missing[0]}.pt")
        if not (self._directory / f"{file}.info.pt").is_file():
            return {}
        infos = _load(self._directory, f"{file}.info.pt")
        try:
            return {
                key: NxdTensorInfo(
                    tuple(infos[tid]["shape"]), SAFETENSORS_DTYPES[infos[tid]["dtype"]]
                )
                for key, tid in references.items()
            }
        except (KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{file}.info.pt is not what NxD writes") from error


def _load_rank_state(directory: Path, file: str) -> dict[str, Any]:
    state = _load(directory, file)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CorruptCheckpointError(f"{file} is not a dictionary of tensors")
    for key, value in state.items():
        if isinstance(value, _TensorReference) and type(vars(value).get("tid")) is not int:
            raise CorruptCheckpointError(f"{file} does not name the file of {key}")
    return state


def _load_separate_tensor(directory: Path, file: str) -> torch.Tensor:
    return _validate_tensor(_load(directory, file), f"{file} contains a value")


def _load(directory: Path, file: str) -> Any:
    try:
        with torch.serialization.safe_globals([(_TensorReference, _REFERENCE_GLOBAL)]):
            return torch.load(directory / file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"there is no {file}") from error
    except UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        problem = f"refers to {match[1]}" if match else "contains more than tensors"
        raise CorruptCheckpointError(
            f"{file} {problem}, and could run code when it is loaded; it was not loaded"
        ) from error
    except _READ_ERRORS as error:
        raise CorruptCheckpointError(f"{file} cannot be read ({error})") from error


def _validate_tensor(value: Any, description: str) -> torch.Tensor:
    """Return `value` if it is a dense CPU tensor of a dtype that safetensors supports."""
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpointError(f"{description} as {type(value).__name__}, not as a tensor")
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise CorruptCheckpointError(f"{description} as a tensor without plain values")
    if value.dtype not in SAFETENSORS_DTYPES:
        raise CorruptCheckpointError(f"{description} in {value.dtype}")
    return value.detach()


def _build_tensor_info(tensor: torch.Tensor) -> NxdTensorInfo:
    return NxdTensorInfo(tuple(tensor.shape), SAFETENSORS_DTYPES[tensor.dtype])
