"""Export of weights to Hugging Face (to_hf): safetensors files and model.safetensors.index.json.

The directory is renamed to its final name when all files are complete.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hlat.checkpoint import checkpoint_store, safetensors_file
from hlat.checkpoint.hugging_face.pretrained_weights import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.distributed.state_shard import BUFFERS
from hlat.distributed.tensor_slice import build_full_slice
from hlat.model.decoder_spec import list_buffer_specs, list_parameter_specs
from hlat.model.families import FAMILIES
from hlat.model.parameter_spec import ParameterSpec
from hlat.precision.torch_dtypes import TORCH_DTYPES
from hlat.storage import durable_files, output_directory
from hlat.storage.storage_path import StoragePath


@dataclass(frozen=True)
class ExportShard:
    """File name, parameters in order and size in bytes of a safetensors shard.

    `tensor_names` are the names of the parameters in the file.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    tensor_names: tuple[str, ...]
    num_bytes: int


def split_into_shards(model: ModelConfig, dtype: Dtype, max_bytes: int) -> tuple[ExportShard, ...]:
    """Split the parameters of a model, in order, into shards of at most `max_bytes` of weights.

    A larger parameter gets a separate shard.
    """
    itemsize = TORCH_DTYPES[dtype].itemsize
    groups: list[list[ParameterSpec]] = [[]]
    for parameter in list_parameter_specs(model):
        if groups[-1] and sum(p.numel for p in [*groups[-1], parameter]) * itemsize > max_bytes:
            groups.append([])
        groups[-1].append(parameter)
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else [SAFE_WEIGHTS_NAME]
    family = FAMILIES[model.family]
    return tuple(
        ExportShard(
            name,
            tuple(group),
            tuple(family.format_tensor_name(parameter.name) for parameter in group),
            sum(p.numel for p in group) * itemsize,
        )
        for name, group in zip(names, groups, strict=True)
    )


def export_weights(
    output: Path,
    checkpoint: StoragePath,
    shards: tuple[ExportShard, ...],
    dtype: Dtype,
    extra_files: Mapping[str, bytes],
    on_shard_written: Callable[[ExportShard], None],
    allow_non_finite: bool = False,
    weights_key: str = "weights",
) -> None:
    """Write weights and further files (config.json, tokenizer) to a new directory durably.

    Wider weights are rounded to the nearest value of `dtype`. `weights_key` is the key of the
    weights in the checkpoint.

    Raises:
        ConfigError: If the output exists, the disk has too little space, or a weight is NaN or
            infinite without `allow_non_finite`.
        CorruptCheckpointError: If the checkpoint was changed after it was verified.
        OSError: If writing fails; the incomplete output is removed.
    """
    with output_directory.create_output_directory(output) as directory:
        output_directory.validate_free_space(output, sum(shard.num_bytes for shard in shards))
        records = checkpoint_store.load_manifest(checkpoint).tensors
        with safetensors_file.SafetensorsReader(checkpoint, records) as reader:
            for shard in shards:
                tensors = {}
                for parameter, key in zip(shard.parameters, shard.tensor_names, strict=True):
                    name, shape = parameter.name, parameter.shape
                    tensor = reader.read(f"{weights_key}/{name}", build_full_slice(shape))
                    tensor = tensor.to(TORCH_DTYPES[dtype])
                    if not allow_non_finite:
                        _validate_finite(tensor, f"{name} in {checkpoint}", dtype)
                    tensors[key] = (shape, tensor)
                # transformers 4 requires the format
                blocks = safetensors_file.serialize_tensors(tensors, {"format": "pt"})
                durable_files.write_file(directory / shard.name, blocks)
                on_shard_written(shard)
        if len(shards) > 1:
            weight_map = {name: shard.name for shard in shards for name in shard.tensor_names}
            metadata = {"total_size": sum(shard.num_bytes for shard in shards)}
            index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
            extra_files = {SAFE_WEIGHTS_INDEX_NAME: index.encode(), **extra_files}
        for name, content in extra_files.items():
            durable_files.write_file(directory / name, [content])
        durable_files.fsync_directory(directory)
        durable_files.rename_durably(directory, output.absolute())


def _validate_finite(tensor: Tensor, label: str, dtype: Dtype) -> None:
    is_finite = tensor.isfinite()
    if not is_finite.all():
        raise ConfigError(
            f"{label} has {(~is_finite).sum()} of {tensor.numel()} elements that are NaN or "
            f"infinite in {dtype.value}; export an earlier step, or use allow_non_finite=true"
        )


def validate_buffers(checkpoint: StoragePath, model: ModelConfig) -> None:
    """Raise ConfigError if a buffer that changes the outputs differs from its initial value.

    No family has names for buffers in its files.
    """
    records = checkpoint_store.load_manifest(checkpoint).tensors
    with safetensors_file.SafetensorsReader(checkpoint, records) as reader:
        for spec in list_buffer_specs(model):
            if not spec.changes_outputs:
                continue
            values = reader.read(f"{BUFFERS}/{spec.name}", build_full_slice(spec.shape))
            if bool((values != spec.initial_value).any()):
                raise ConfigError(
                    f"{spec.name} in {checkpoint} differs from {spec.initial_value:g}, and "
                    f"model.family={model.family} has no name for it; evaluate the checkpoint with "
                    f"hlat, or train without {spec.key}"
                )


def validate_weights_match(checkpoint: StoragePath, model: ModelConfig) -> None:
    """Raise ConfigError if a checkpoint does not contain exactly the weights of a model."""
    tensors = checkpoint_store.load_manifest(checkpoint).tensors
    saved = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("weights/")}
    # Checked first: a forged number of layers would build a huge list of parameters
    if model.num_layers > len(saved) or saved != {
        f"weights/{parameter.name}": parameter.shape for parameter in list_parameter_specs(model)
    }:
        raise ConfigError(f"{checkpoint} does not contain the weights of the model it describes")
