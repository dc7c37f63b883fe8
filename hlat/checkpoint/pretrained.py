"""Weights to begin from: a Hugging Face folder, or what neuronx-distributed (NxD) saved.

All that can be wrong with a folder's names and shapes is found in the files' headers, before a
model is built, so that a login node can look: without torch into safetensors files, and at the
names of NxD's. Then each process reads no more than its own slices of the files, which stay on the
disk, and nothing that is read can run code.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from hlat.checkpoint import nxd_folder
from hlat.checkpoint.box import Box
from hlat.checkpoint.chunk import Chunk
from hlat.checkpoint.manifest import MARKER, SliceRecord, TensorRecord
from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.model import hugging_face
from hlat.model.canonical import parameters

if TYPE_CHECKING:
    import torch

    from hlat.checkpoint.tensor_file import Reader

SINGLE = "model.safetensors"
"""Name of the file of weights where there is one."""
INDEX = "model.safetensors.index.json"
"""Name of the file that says which of several files holds which tensor."""

_DTYPES = ("F32", "BF16", "F16")
_MOST_NAMED = 5
"""Tensors that a sentence names before it counts the rest."""


class _Weights(Protocol):
    """Canonical weights on a disk, by name."""

    def read(self, name: str, box: Box) -> "torch.Tensor":
        """A part of one, in the dtype in which it was saved."""
        ...

    def dtype(self, name: str) -> str:
        """That dtype, as safetensors names it."""
        ...


def check(folder: str, model: Model) -> None:
    """Return if a folder holds exactly the weights of a model.

    Args:
        folder: What model.init_from says.
        model: Shape of the model.

    Raises:
        ConfigError: Every reason why it does not.
    """
    path = Path(folder).expanduser()
    with _told_of(folder):
        if not _is_nxd(path):
            _checked(folder, path, model)
        elif find_spec("torch") is not None:
            _nxd(path, model)
        else:
            nxd_folder.ranks(nxd_folder.chosen(path))


def found_in(folder: str) -> str:
    """The folder that holds the weights: of what NxD saved, one tag's.

    Args:
        folder: What model.init_from says, and was checked.
    """
    path = Path(folder).expanduser()
    return str(nxd_folder.chosen(path)) if _is_nxd(path) else folder


def fill(folder: str, model: Model, chunks: Iterable[Chunk]) -> str:
    """Fill every chunk of weights from a folder, converted to the dtype of the chunk's tensor.

    Args:
        folder: What found_in gives, or model.init_from says.
        model: Shape of the model.
        chunks: Slices of a state; those that are no weights, such as moments, are left as they
            are.

    Returns:
        A fingerprint, in hexadecimal: sha256 of every parameter's name, shape, dtype and first row.

    Raises:
        ConfigError: The folder does not hold exactly the weights of the model.
    """
    # It imports torch, which a login node that only checks a folder may lack
    from hlat.checkpoint import tensor_file

    digest = hashlib.sha256()
    with _told_of(folder), _opened(folder, model) as weights:
        for chunk in chunks:
            kind, _, name = chunk.name.partition("/")
            if kind == "weights":
                values = weights.read(name, Box(chunk.offset, chunk.size))
                chunk.tensor.detach().copy_(values.view(chunk.tensor.shape))
        for parameter in parameters(model):
            name, shape = parameter.name, parameter.shape
            first = weights.read(name, Box((0,) * len(shape), (1, *shape[1:])))
            digest.update(f"{name} {shape} {weights.dtype(name)} ".encode())
            digest.update(tensor_file.to_bytes(first))
    return digest.hexdigest()


@contextmanager
def _told_of(folder: str) -> Iterator[None]:
    """Say of every problem in which folder it is."""
    try:
        yield
    except ConfigError as error:
        told = (f"model.init_from={folder}: {problem}" for problem in error.problems)
        raise ConfigError(*told) from error


@contextmanager
def _opened(folder: str, model: Model) -> Iterator[_Weights]:
    """The weights in a folder, which is checked first."""
    from hlat.checkpoint import tensor_file

    path = Path(folder).expanduser()
    if _is_nxd(path):
        yield _nxd(path, model)
        return
    records = _checked(folder, path, model)
    with tensor_file.Reader(path) as reader:
        yield _HuggingFaceWeights(records, reader)


@dataclass(frozen=True)
class _HuggingFaceWeights:
    """Those of a Hugging Face folder."""

    records: Mapping[str, TensorRecord]
    reader: "Reader"

    def read(self, name: str, box: Box) -> "torch.Tensor":
        return self.reader.read(name, self.records[name], box)

    def dtype(self, name: str) -> str:
        return self.records[name].dtype


def _is_nxd(path: Path) -> bool:
    hugging_face_files = any((path / name).is_file() for name in (SINGLE, INDEX))
    return path.is_dir() and not hugging_face_files and nxd_folder.recognised(path)


def _nxd(path: Path, model: Model) -> _Weights:
    """Those of an NxD folder, and what a config.json beside them says of the model."""
    from hlat.checkpoint.nxd_weights import NxdWeights

    if (path / "config.json").is_file():
        _refuse(hugging_face.problems(model, _json(path / "config.json")))
    return NxdWeights(path, model)


def _checked(folder: str, path: Path, model: Model) -> dict[str, TensorRecord]:
    """Where each parameter lies in a Hugging Face folder, by its canonical name."""
    _refuse_other_folders(folder, path)
    _refuse(hugging_face.problems(model, _json(path / "config.json")))
    records = _records(path)
    _refuse(_misfits(model, records))
    return records


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)


def _refuse_other_folders(name: str, path: Path) -> None:
    """Refuse what is no folder, and folders in other formats."""
    if not path.is_dir():
        hint = "name a folder with config.json and *.safetensors"
        if len(PurePath(name).parts) == 2 and name[0] not in "./~":
            local = PurePath(name).name
            hint += f"; if it is a model of the hub: hf download {name} --local-dir {local}"
        raise ConfigError(f"there is no such folder; {hint}")
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        return
    if (path / MARKER).is_file():
        raise ConfigError(
            "it is a checkpoint of hlat; write its weights as such a folder first, by "
            f"python -m hlat.export {name} --output DIR, then model.init_from=DIR"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ConfigError(
            f"{pickles[0]} is a pickle, which can run code when it is loaded; convert the folder "
            "where you trust it, with transformers: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)"
        )
    raise ConfigError(f"it has neither {SINGLE} nor {INDEX}; name a Hugging Face Llama folder")


def _records(path: Path) -> dict[str, TensorRecord]:
    """Every tensor of a folder by name, from the headers of its files."""
    if (path / SINGLE).is_file():
        return _header(path / SINGLE)
    files = _json(path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ConfigError(f"{INDEX} has no weight_map from tensors to files")
    if outside := [file for file in files.values() if PurePath(file).name != file]:
        raise ConfigError(f"{INDEX} names {outside[0]}, which is outside of the folder")
    headers = {file: _header(path / file) for file in sorted(set(files.values()))}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in headers[file]]:
        raise ConfigError(f"{INDEX} promises {_named(lost)}, and it is not there")
    return {name: headers[file][name] for name, file in files.items()}


def _header(path: Path) -> dict[str, TensorRecord]:
    records = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  the file is no dictionary
                found = file.get_slice(name)
                shape = tuple(found.get_shape())
                whole = SliceRecord((0,) * len(shape), shape, path.name)
                records[name] = TensorRecord(shape, found.get_dtype(), (whole,))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path.name} cannot be read ({error})") from error
    return records


def _misfits(model: Model, records: Mapping[str, TensorRecord]) -> list[str]:
    """Parameters that are missing or other than the model's, and tensors that are none of them."""
    expected = {parameter.name: parameter.shape for parameter in parameters(model)}
    known = set(expected) | ({"lm_head.weight"} if model.tie_embeddings else set())
    found = []
    if missing := [name for name in expected if name not in records]:
        found.append(f"it lacks {_named(missing)}")
    # Buffers that early conversions of Llama stored; transformers skips them too
    extra = [n for n in records if n not in known and not n.endswith("rotary_emb.inv_freq")]
    if extra:
        found.append(f"it has {_named(extra)}, which this model has not")
    for name, shape in expected.items():
        if name in records and records[name].shape != shape:
            found.append(f"{name} has shape {list(records[name].shape)}, this run {list(shape)}")
        elif name in records and records[name].dtype not in _DTYPES:
            found.append(f"{name} has dtype {records[name].dtype}; hlat reads {', '.join(_DTYPES)}")
    more = len(found) - _MOST_NAMED
    return found if more <= 0 else [*found[:_MOST_NAMED], f"and {more} more of the kind"]


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read ({error.strerror})") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return content
