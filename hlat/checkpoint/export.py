"""Writes a checkpoint's weights as a Hugging Face folder.

The folder appears at once, complete, by a rename, and never holds more in memory than one of its
files. Weights are what the store has under canonical names, so no layout is ever undone here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hlat.checkpoint import durable, new_folder, store, tensor_file
from hlat.checkpoint.box import Box
from hlat.checkpoint.manifest import TensorRecord
from hlat.checkpoint.pretrained import INDEX, SINGLE
from hlat.checkpoint.remote import RemotePath
from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.config.precision import Dtype
from hlat.model.canonical import Parameter, parameters


@dataclass(frozen=True)
class Shard:
    """A file of weights: its name, its parameters in order, and their bytes."""

    name: str
    parameters: tuple[Parameter, ...]
    num_bytes: int


def shards(model: Model, dtype: Dtype, max_bytes: int) -> tuple[Shard, ...]:
    """Cut a model's parameters, in order, into files of at most `max_bytes` of weights.

    A parameter that is larger by itself has a file of its own.
    """
    size = tensor_file.RECIPE_DTYPES[dtype].itemsize
    groups: list[list[Parameter]] = [[]]
    for parameter in parameters(model):
        if groups[-1] and sum(p.numel for p in [*groups[-1], parameter]) * size > max_bytes:
            groups.append([])
        groups[-1].append(parameter)
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    return tuple(
        Shard(name, tuple(group), sum(p.numel for p in group) * size)
        for name, group in zip(names if len(groups) > 1 else [SINGLE], groups, strict=True)
    )


def write(
    output: Path,
    checkpoint: Path | RemotePath,
    files: tuple[Shard, ...],
    dtype: Dtype,
    documents: Mapping[str, bytes],
    tell: Callable[[Shard], None],
) -> None:
    """Write a folder of weights and documents, and return when it would survive a power cut.

    Args:
        output: The folder; it must not exist yet. Missing parents are made.
        checkpoint: A checkpoint that was verified.
        files: What `shards` made of the model.
        dtype: The weights' dtype in the files.
        documents: Further files by name; the last is written last.
        tell: Hears of every file of weights that is finished.

    Raises:
        ConfigError: The output exists, or there is no room for it.
        CorruptCheckpointError: The checkpoint was changed since it was verified.
        OSError: It could not be written. Nothing of it is left.
    """
    with new_folder.temporary(output) as folder:
        new_folder.refuse_full_disk(output, sum(file.num_bytes for file in files))
        records = store.check_files(checkpoint).tensors
        with tensor_file.Reader(checkpoint) as reader:
            for file in files:
                tensors = {
                    parameter.name: (parameter.shape, _read(reader, records, parameter, dtype))
                    for parameter in file.parameters
                }
                # transformers 4 refuses a file that does not say so
                parts = tensor_file.parts(tensors, {"format": "pt"})
                durable.write(folder / file.name, parts)
                tell(file)
        index = {INDEX: _index(files)} if len(files) > 1 else {}
        for name, content in (index | dict(documents)).items():
            durable.write(folder / name, [content])
        durable.sync_folder(folder)
        durable.rename(folder, output.absolute())


def refuse_other_weights(checkpoint: Path | RemotePath, model: Model) -> None:
    """Return if a checkpoint holds exactly the weights of a model.

    Raises:
        ConfigError: It does not, so that what it says of its model is not so.
    """
    tensors = store.check_files(checkpoint).tensors
    saved = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("weights/")}
    # A number of layers that was made up must not become a list of parameters
    if model.num_layers > len(saved) or saved != {
        f"weights/{parameter.name}": parameter.shape for parameter in parameters(model)
    }:
        raise ConfigError(f"{checkpoint} does not hold the weights of the model that it describes")


def _read(
    reader: tensor_file.Reader,
    records: Mapping[str, TensorRecord],
    parameter: Parameter,
    dtype: Dtype,
) -> torch.Tensor:
    """A whole parameter, rounded to nearest if it was saved in a wider dtype."""
    name = f"weights/{parameter.name}"
    whole = Box((0,) * len(parameter.shape), parameter.shape)
    return reader.read(name, records[name], whole).to(tensor_file.RECIPE_DTYPES[dtype])


def _index(files: tuple[Shard, ...]) -> bytes:
    weight_map = {parameter.name: file.name for file in files for parameter in file.parameters}
    total = {"total_size": sum(file.num_bytes for file in files)}
    return json.dumps({"metadata": total, "weight_map": weight_map}, indent=2).encode()
