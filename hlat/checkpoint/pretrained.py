"""Weights to begin from: a folder of safetensors files and a config.json, as Hugging Face has them.

All that can be wrong with it is found in the files' headers, before a model is built, and without
torch, so that a login node can look. Then each process reads no more than its own slices of the
files, which stay on the disk, and nothing that is read can hold code.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from hlat.checkpoint.box import Box
from hlat.checkpoint.chunk import Chunk
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.manifest import MARKER, SliceRecord, TensorRecord
from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.model import hugging_face
from hlat.model.canonical import parameters

SINGLE = "model.safetensors"
"""Name of the file of weights where there is one."""
INDEX = "model.safetensors.index.json"
"""Name of the file that says which of several files holds which tensor."""

_DTYPES = ("F32", "BF16", "F16")
_MOST_NAMED = 5
"""Tensors that a sentence names before it counts the rest."""


def check(folder: str, model: Model) -> dict[str, TensorRecord]:
    """Look whether a folder holds exactly the weights of a model.

    Args:
        folder: What model.init_from says.
        model: Shape of the model.

    Returns:
        Where each canonical parameter lies, by its name.

    Raises:
        ConfigError: Every reason why it does not.
    """
    path = Path(folder).expanduser()
    try:
        _refuse_other_folders(folder, path)
        found = hugging_face.problems(model, _json(path / "config.json"))
        records = {} if found else _records(path)
        found = found or _misfits(model, records)
    except ConfigError as error:
        found = list(error.problems)
    if found:
        raise ConfigError(*(f"model.init_from={folder}: {problem}" for problem in found))
    return records


def fill(folder: str, model: Model, chunks: Iterable[Chunk]) -> str:
    """Fill every chunk of weights from a folder, converted to the dtype of the chunk's tensor.

    Args:
        folder: What model.init_from says.
        model: Shape of the model.
        chunks: Slices of a state; those that are no weights, such as moments, are left as they
            are.

    Returns:
        A fingerprint, in hexadecimal: sha256 of every parameter's name, shape, dtype and first row.

    Raises:
        ConfigError: The folder does not hold exactly the weights of the model.
    """
    # They import torch, which a login node that only checks a folder may lack
    from hlat.checkpoint import tensor_file

    records, digest = check(folder, model), hashlib.sha256()
    try:
        with tensor_file.Reader(Path(folder).expanduser()) as reader:
            for chunk in chunks:
                kind, _, name = chunk.name.partition("/")
                if kind == "weights":
                    values = reader.read(name, records[name], Box(chunk.offset, chunk.size))
                    chunk.tensor.detach().copy_(values.view(chunk.tensor.shape))
            for parameter in parameters(model):
                name, shape = parameter.name, parameter.shape
                first = reader.read(name, records[name], Box((0,) * len(shape), (1, *shape[1:])))
                digest.update(f"{name} {shape} {records[name].dtype} ".encode())
                digest.update(tensor_file.to_bytes(first))
    except CorruptCheckpointError as error:
        raise ConfigError(f"model.init_from={folder}: {error}") from error
    return digest.hexdigest()


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
