"""Loading of pretrained safetensors of Hugging Face (from_hf), and of NxD checkpoints.

Weights are not converted: the checkpoint store has the names and shapes of Hugging Face
(model/parameter_spec.py). They are validated from the headers of the files, so that a login node
can do it: for safetensors without torch, for NxD by file names. Loading never runs code from a
file.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hlat.checkpoint import nxd_directory
from hlat.checkpoint.checkpoint_errors import (
    parse_json_object,
    raise_as_corrupt,
    raise_problems,
)
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER, TensorRecord
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.model import ModelConfig
from hlat.distributed.state_shard import StateShard
from hlat.distributed.tensor_slice import build_full_slice
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.families import FAMILIES, hugging_face_config
from hlat.model.upcycling_spec import build_dense_model, get_dense_name, is_upcycled
from hlat.storage.bounded_files import read_bounded

if TYPE_CHECKING:
    import torch

    from hlat.checkpoint.nxd_weights import NxdWeightReader
    from hlat.checkpoint.safetensors_file import SafetensorsReader
    from hlat.checkpoint.upcycled_weights import UpcycledWeightReader

SAFE_WEIGHTS_NAME = "model.safetensors"
"""File of the weights if there is a single one."""
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
"""File that maps tensors to files if there are several."""

_EMBEDDING_NAME, _HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F32", "BF16", "F16")
_MAX_LISTED = 5
"""Number of tensors that an error message lists."""


def validate_pretrained(directory: str, model: ModelConfig) -> None:
    """Raise ConfigError with all problems unless a directory has exactly the weights of a model.

    `directory` is the value of model.init_from. For an upcycled model, these are the weights of the
    dense model.
    """
    path = Path(directory).expanduser()
    with _prefix_errors(directory):
        source = _find_source_model(directory, path, model)
        if not _is_nxd(path):
            _load_validated_records(directory, path, source)
        elif find_spec("torch") is not None:
            _open_nxd_weights(path, source)
        else:
            nxd_directory.list_rank_files(nxd_directory.find_model_dir(path))


def find_weights_dir(directory: str) -> str:
    """Return the directory of the weights, which is that of a tag in an NxD checkpoint."""
    path = Path(directory).expanduser()
    return str(nxd_directory.find_model_dir(path)) if _is_nxd(path) else directory


def load_pretrained(
    directory: str, model: ModelConfig, shards: Iterable[StateShard], seed: int = 0
) -> str:
    """Fill every shard of weights, converted to the dtype of the shard's tensor.

    `seed` determines the routers and the noise of an upcycled model. Returns a fingerprint of the
    weights in the directory.

    Raises:
        ConfigError: If the directory does not contain exactly the weights of the model, or if a
            shard contains NaN or infinity, or a tied head that differs from the embedding.
    """
    # Deferred: imports torch, which a login node may lack
    from hlat.checkpoint.upcycled_weights import UpcycledWeightReader

    with _prefix_errors(directory):
        source = _find_source_model(directory, Path(directory).expanduser(), model)
        with _open_weights(directory, source) as saved:
            weights = UpcycledWeightReader(saved, model, seed) if is_upcycled(model) else saved
            _load_shards(weights, model, shards)
            return _compute_fingerprint(saved, source)


def _load_shards(
    weights: "NxdWeightReader | SafetensorsReader | UpcycledWeightReader",
    model: ModelConfig,
    shards: Iterable[StateShard],
) -> None:
    """Fill every shard of weights; raise ConfigError with the problems of all values."""
    problems = []
    for shard in shards:
        kind, _, name = shard.name.partition("/")
        if kind == "weights":
            tensor = weights.read(name, shard.tensor_slice)
            has_tied_head = model.tie_embeddings and name == _EMBEDDING_NAME
            has_tied_head = has_tied_head and weights.has_tensor(_HEAD_NAME)
            tied = weights.read(_HEAD_NAME, shard.tensor_slice) if has_tied_head else None
            saved_name = get_dense_name(name) if is_upcycled(model) else name
            problems += _find_value_problems(saved_name, tensor, tied)
            shard.tensor.detach().copy_(tensor.view(shard.tensor.shape))
    raise_problems(list(dict.fromkeys(problems)))


def _compute_fingerprint(weights: "NxdWeightReader | SafetensorsReader", model: ModelConfig) -> str:
    """Return the SHA-256 of name, shape, dtype and first row of every parameter, hexadecimal."""
    from hlat.checkpoint import safetensors_file

    digest = hashlib.sha256()
    for parameter in list_parameter_specs(model):
        name, shape = parameter.name, parameter.shape
        first_row = weights.read(name, build_full_slice((1, *shape[1:])))
        digest.update(f"{name} {shape} {weights.get_dtype(name)} ".encode())
        digest.update(safetensors_file.to_bytes(first_row))
    return digest.hexdigest()


def _find_value_problems(
    name: str, tensor: "torch.Tensor", tied: "torch.Tensor | None"
) -> list[str]:
    """Return what is wrong with a slice of a parameter; `tied` is that of the tied output head."""
    if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
        return [f"{name} contains NaN or infinity; use the weights of a run that did not diverge"]
    if tied is not None and not bool((tied.float() == tensor.float()).all()):
        return [
            f"config.json has tie_word_embeddings=true, but {_HEAD_NAME} differs from {name}; set "
            "tie_word_embeddings=false in config.json and model.tie_embeddings=false, or remove "
            f"{_HEAD_NAME}"
        ]
    return []


@contextmanager
def _prefix_errors(directory: str) -> Iterator[None]:
    """Prefix the problems of a ConfigError with the configuration key and the directory."""
    try:
        yield
    except ConfigError as error:
        problems = (f"model.init_from={directory}: {problem}" for problem in error.problems)
        raise ConfigError(*problems) from error


@contextmanager
def _open_weights(
    directory: str, model: ModelConfig
) -> "Iterator[NxdWeightReader | SafetensorsReader]":
    from hlat.checkpoint import safetensors_file

    path = Path(directory).expanduser()
    if _is_nxd(path):
        yield _open_nxd_weights(path, model)
        return
    records, keys = _load_validated_records(directory, path, model)
    with safetensors_file.SafetensorsReader(path, records, keys) as reader:
        yield reader


def _is_nxd(path: Path) -> bool:
    return (
        path.is_dir()
        and not (path / SAFE_WEIGHTS_NAME).is_file()
        and not (path / SAFE_WEIGHTS_INDEX_NAME).is_file()
        and nxd_directory.is_nxd_checkpoint(path)
    )


def _find_source_model(directory: str, path: Path, model: ModelConfig) -> ModelConfig:
    """Return the model of the weights in a directory: the dense one of an upcycled model.

    Raises:
        ConfigError: If model.mlp.moe.upcycling_noise is set for weights with experts, or not set
            for the weights of a dense model.
    """
    noise = model.mlp.moe.upcycling_noise
    if model.mlp.kind != "moe":
        return model
    config, family = None, FAMILIES["llama"]  # NxD directories contain Llama models
    if not _is_nxd(path):
        _validate_format(directory, path)
        config = _load_json(path / "config.json")
        family = hugging_face_config.find_family(config)
    if family.fixed.get("mlp.kind", "dense") != "dense":
        if noise is None:
            return model
        raise ConfigError(
            f"config.json has model_type={family.model_type}, a model with experts, but "
            f"model.mlp.moe.upcycling_noise={noise:g} starts from a dense model; set "
            "model.mlp.moe.upcycling_noise=null"
        )
    dense = build_dense_model(model, family.name)
    if noise is not None:
        return dense
    mismatches = hugging_face_config.find_hf_config_mismatches
    raise ConfigError(
        "it is a dense model, and this run has model.mlp.kind=moe; set "
        "model.mlp.moe.upcycling_noise=0 to start each expert as a copy of the dense network, or "
        "model.mlp.kind=dense",
        *([] if config is None else mismatches(dense, config)),
    )


def _open_nxd_weights(path: Path, model: ModelConfig) -> "NxdWeightReader":
    from hlat.checkpoint.nxd_weights import NxdWeightReader

    if (path / "config.json").is_file():
        _validate_model_config(path, model)
    return NxdWeightReader(path, model)


def _load_validated_records(
    directory: str, path: Path, model: ModelConfig
) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """Return the records, and the keys in files, of the parameters in a Hugging Face directory.

    Both are by canonical name.
    """
    _validate_format(directory, path)
    model_type = _validate_model_config(path, model)
    family = next(one for one in FAMILIES.values() if one.model_type == model_type)
    keys = {spec.name: family.format_tensor_name(spec.name) for spec in list_parameter_specs(model)}
    names = {key: name for name, key in keys.items()}
    records = {names.get(key, key): one for key, one in _load_tensor_records(path).items()}
    raise_problems(_find_mismatches(model, records))
    return records, keys


def _validate_model_config(path: Path, model: ModelConfig) -> str:
    """Raise ConfigError if config.json does not fit the model; return its model_type."""
    config = _load_json(path / "config.json")
    raise_config_errors(hugging_face_config.find_hf_config_mismatches(model, config))
    return str(config["model_type"])


def _validate_format(name: str, path: Path) -> None:
    """Raise ConfigError if a path is not a directory of safetensors files."""
    if not path.is_dir():
        hint = "specify a directory with config.json and *.safetensors"
        if len(PurePath(name).parts) == 2 and name[0] not in "./~":
            local = PurePath(name).name
            hint += f"; if it is a model of the hub: hf download {name} --local-dir {local}"
        raise ConfigError(f"there is no such directory; {hint}")
    if (path / SAFE_WEIGHTS_NAME).is_file() or (path / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return
    if (path / COMMIT_MARKER).is_file():
        raise ConfigError(
            "it is a checkpoint of hlat; export its weights first with "
            f"hlat export {name} output=DIR, then set model.init_from=DIR"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ConfigError(
            f"{pickles[0]} is a pickle, which can run code when it is loaded; convert the "
            "directory where you trust it, with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    raise ConfigError(
        f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; specify a Hugging Face "
        "directory of a supported family"
    )


def _load_tensor_records(path: Path) -> dict[str, TensorRecord]:
    """Return the records of all tensors in a directory from the headers of its files."""
    if (path / SAFE_WEIGHTS_NAME).is_file():
        return _load_header(path / SAFE_WEIGHTS_NAME)
    files = _load_json(path / SAFE_WEIGHTS_INDEX_NAME).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ConfigError(f"{SAFE_WEIGHTS_INDEX_NAME} has no weight_map from tensors to files")
    names = set(files.values())
    if outside := [file for file in names if PurePath(file).name != file or not file.isprintable()]:
        raise ConfigError(
            f"{SAFE_WEIGHTS_INDEX_NAME} names {outside[0]}, which is outside of the directory"
        )
    headers = {file: _load_header(path / file) for file in sorted(set(files.values()))}
    if missing := [
        f"{name} in {file}" for name, file in files.items() if name not in headers[file]
    ]:
        raise ConfigError(
            f"{SAFE_WEIGHTS_INDEX_NAME} lists {_format_names(missing)}, which does not exist"
        )
    return {name: headers[file][name] for name, file in files.items()}


def _load_header(path: Path) -> dict[str, TensorRecord]:
    records = {}
    with raise_as_corrupt(path.name, SafetensorError), safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118  the file is not a dictionary
            tensor = file.get_slice(name)
            shape = tuple(tensor.get_shape())
            records[name] = TensorRecord.from_single_file(shape, tensor.get_dtype(), path.name)
    return records


def _find_mismatches(model: ModelConfig, records: Mapping[str, TensorRecord]) -> list[str]:
    """Return the missing and different parameters, and the tensors that are not parameters."""
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(model)}
    # A tied head may be stored; its values are compared when the weights are loaded
    optional = {_HEAD_NAME: shapes[_EMBEDDING_NAME]} if model.tie_embeddings else {}
    known = shapes | optional
    problems = []
    if missing := [name for name in shapes if name not in records]:
        problems.append(f"it lacks {_format_names(missing)}")
    # Early conversions of Llama store this buffer; transformers ignores it too
    extra = [n for n in records if n not in known and not n.endswith("rotary_emb.inv_freq")]
    if extra:
        problems.append(f"it has {_format_names(extra)}, which this model lacks")
    for name, record in ((name, records[name]) for name in known if name in records):
        if record.shape != known[name]:
            problems.append(f"{name} has shape {list(record.shape)}, this run {list(known[name])}")
        elif record.dtype not in _DTYPES:
            problems.append(f"{name} has dtype {record.dtype}; hlat reads {', '.join(_DTYPES)}")
    return problems


def _format_names(names: list[str]) -> str:
    num_more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")


def _load_json(path: Path) -> dict[str, Any]:
    with raise_as_corrupt(path.name):
        return parse_json_object(read_bounded(path), path.name)
