"""Files that neuronx-distributed (NxD) saved, tensor by tensor.

NxD writes with torch.save, so its files are pickles. torch alone reads them, which rebuilds tensors
and refuses whatever else a pickle may ask for; files are mapped, so that of a rank's weights only
what is used comes into memory.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch

from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.tensor_file import DTYPES

_DAMAGED = (
    *(AssertionError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""What torch's reader of weights raises where a file's bytes make no sense."""

_T = TypeVar("_T")
_Read = Callable[[str], _T]


class _Reference:
    """What stands in a rank's file for a tensor that has a file of its own."""

    tid: int


_KNOWN_AS = "torch_xla.utils.serialization.TensorReference"
"""A reference's name in the pickles of a checkpoint saved with use_xser."""


@dataclass(frozen=True)
class Entry:
    """A tensor as it is announced: its shape, and its dtype as safetensors names it."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Files:
    """The ranks' files of one checkpoint.

    Args:
        folder: In which they are.
        mapped: How many may be mapped at a time: those of the ranks that share a parameter.
    """

    def __init__(self, folder: Path, mapped: int) -> None:
        self._folder = folder
        self._state: _Read[dict[str, Any]] = lru_cache(mapped)(partial(_read_state, folder))
        self._own: _Read[torch.Tensor] = lru_cache(mapped)(partial(_read_own, folder))
        self._entries: dict[str, dict[str, Entry]] = {}

    def entries(self, file: str) -> dict[str, Entry]:
        """The tensors of a rank by name.

        Raises:
            CorruptCheckpointError: The file, or that of a tensor, is missing or something else.
        """
        state = self._state(file)
        references = {k: value.tid for k, value in state.items() if isinstance(value, _Reference)}
        found = self._announced(file, references) if references else {}
        rest = (key for key in state if key not in found)
        self._entries[file] = found | {key: _entry(self._tensor(file, key)) for key in rest}
        return self._entries[file]

    def tensor(self, file: str, key: str) -> torch.Tensor:
        """One of the entries of a rank, on the disk until its elements are used.

        Raises:
            CorruptCheckpointError: It is not what was announced.
        """
        tensor, announced = self._tensor(file, key), self._entries[file][key]
        if _entry(tensor) != announced:
            raise CorruptCheckpointError(
                f"{file} has {key} as {_entry(tensor)}, its .info.pt says {announced}"
            )
        return tensor

    def _tensor(self, file: str, key: str) -> torch.Tensor:
        value = self._state(file)[key]
        if isinstance(value, _Reference):
            return self._own(_own_file(file, value.tid))
        return _checked(value, f"{file} holds {key}")

    def _announced(self, file: str, references: dict[str, int]) -> dict[str, Entry]:
        """What NxD wrote down of tensors in files of their own, once these are seen to be there.

        NxD 0.6 and before wrote nothing down.
        """
        folder = self._folder / _own_folder(file)
        there = {own.name for own in folder.iterdir()} if folder.is_dir() else set()
        lost = [tid for tid in references.values() if Path(_own_file(file, tid)).name not in there]
        if len(lost) == len(references):
            raise CorruptCheckpointError(
                f"{_own_folder(file)} holds none of the {len(lost)} tensors of {file}; NxD leaves "
                "them out with avoid_saving_lower_precision_weights: save once without it"
            )
        if lost:
            raise CorruptCheckpointError(f"there is no {_own_file(file, lost[0])}")
        if not (self._folder / f"{file}.info.pt").is_file():
            return {}
        told = _load(self._folder, f"{file}.info.pt")
        try:
            return {
                key: Entry(tuple(told[tid]["shape"]), DTYPES[told[tid]["dtype"]])
                for key, tid in references.items()
            }
        except (KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{file}.info.pt is not what NxD writes") from error


def _read_state(folder: Path, file: str) -> dict[str, Any]:
    state = _load(folder, file)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CorruptCheckpointError(f"{file} holds no tensors by name")
    for key, value in state.items():
        if isinstance(value, _Reference) and type(vars(value).get("tid")) is not int:
            raise CorruptCheckpointError(f"{file} does not say in which file {key} is")
    return state


def _read_own(folder: Path, file: str) -> torch.Tensor:
    return _checked(_load(folder, file), f"{file} holds")


def _load(folder: Path, file: str) -> Any:
    try:
        with torch.serialization.safe_globals([(_Reference, _KNOWN_AS)]):
            return torch.load(folder / file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"there is no {file}") from error
    except UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {asked[1]}" if asked else "holds more than tensors"
        raise CorruptCheckpointError(
            f"{file} {what}, and could run code where it is loaded; it was left alone"
        ) from error
    except _DAMAGED as error:
        raise CorruptCheckpointError(f"{file} cannot be read ({error})") from error


def _own_folder(file: str) -> str:
    return f"{file}.tensors"


def _own_file(file: str, tid: int) -> str:
    return f"{_own_folder(file)}/tensor_{tid}.pt"


def _checked(value: Any, where: str) -> torch.Tensor:
    """The tensor, if it is one with values, in a dtype that safetensors has too."""
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpointError(f"{where} as {type(value).__name__}, not as a tensor")
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise CorruptCheckpointError(f"{where} as a tensor without plain values")
    if value.dtype not in DTYPES:
        raise CorruptCheckpointError(f"{where} in {value.dtype}")
    return value.detach()


def _entry(tensor: torch.Tensor) -> Entry:
    return Entry(tuple(tensor.shape), DTYPES[tensor.dtype])
