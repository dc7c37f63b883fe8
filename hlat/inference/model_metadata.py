"""Model configuration and dtype of a run, checkpoint or Hugging Face directory.

The metadata suffice to configure an engine. They are read without torch, and also from a run
without a checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint.checkpoint_errors import parse_json_object, raise_as_corrupt
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.config import extensions, recorded_config
from hlat.config.components import extend_schema
from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.model.families import hugging_face_config
from hlat.storage import storage_path
from hlat.storage.bounded_files import read_bounded
from hlat.tracking.run_directory import find_latest_submission_path

_CONFIG_KEYS = (
    *("model", "batch.sequence_length"),
    *("precision.param_dtype", "precision.fp32_operators", extensions.KEY),
)


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata of a model without its weights.

    The directory `base_dir` contains the scores in `evaluations`: that of the run or model, or the
    parent of a checkpoint without a run, whose files are fixed. `sequence_length` is that of the
    training, and `dtype` that of the weights in the forward pass.
    """

    base_dir: Path
    model: ModelConfig
    sequence_length: int
    dtype: Dtype
    fp32_operators: tuple[str, ...]


def load_metadata(location: str) -> ModelMetadata | None:
    """Return the metadata of a local model, or None if the location is a URL.

    Raise ConfigError if the location is no run, checkpoint, average or Hugging Face directory.
    """
    path = storage_path.parse_storage_path(location)
    if not isinstance(path, Path):
        return None
    if is_hugging_face_dir(path):
        return load_hugging_face_metadata(path)
    for run_dir in (path, path.absolute().parent.parent):
        if is_run_dir(run_dir):
            return load_run_metadata(run_dir)
        submission_path = find_latest_submission_path(run_dir)
        if submission_path is not None and is_run_dir(submission_path):  # the run has not started
            return _load_metadata(run_dir, submission_path)
    state_file = path / "state.json"
    if (path / COMMIT_MARKER).is_file():
        text = _load_json(state_file).get("config")
        if not isinstance(text, str):
            raise ConfigError(f"{state_file} has no configuration; give another checkpoint")
        values = recorded_config.select_yaml_values(text, str(state_file), *_CONFIG_KEYS)
        return _build_metadata(path.parent, values)
    problem = (
        "is no run, checkpoint or Hugging Face directory" if path.exists() else "does not exist"
    )
    raise ConfigError(f"{path} {problem}; give the directory of a run, such as runs/<run.name>")


def is_run_dir(directory: Path) -> bool:
    """Return True if the directory belongs to a started run."""
    return (directory / "config.yaml").is_file()


def is_hugging_face_dir(directory: Path) -> bool:
    """Return True if the directory contains a model in Hugging Face format."""
    return (directory / "config.json").is_file() and not (directory / COMMIT_MARKER).exists()


def load_run_metadata(run_dir: Path) -> ModelMetadata:
    """Return the metadata in the recorded configuration of a run."""
    return _load_metadata(run_dir, run_dir)


def load_hugging_face_metadata(directory: Path) -> ModelMetadata:
    """Return the metadata in config.json; raise ConfigError if no engine supports the model."""
    config = _load_json(directory / "config.json")
    model, sequence_length, dtype = hugging_face_config.parse_hf_config(config, str(directory))
    # transformers computes Llama's norm and the softmax of its attention in fp32
    return ModelMetadata(directory, model, sequence_length, dtype, ("norm", "softmax"))


def _load_json(path: Path) -> dict[str, Any]:
    with raise_as_corrupt(path):
        return parse_json_object(read_bounded(path), path)


def _load_metadata(run_dir: Path, config_dir: Path) -> ModelMetadata:
    values = recorded_config.load_recorded_settings(config_dir, *_CONFIG_KEYS)
    return _build_metadata(run_dir.absolute(), values)


def _build_metadata(base_dir: Path, values: list[Any]) -> ModelMetadata:
    model, length, dtype, operators, paths = values
    if (word := extensions.find_missing(paths)) is not None:
        raise ConfigError(f"{base_dir}: its model has components of extensions; add {word}")
    try:
        config = parse_section(extend_schema(ModelConfig, "model."), dict(model))
        return ModelMetadata(base_dir, config, int(length), Dtype(dtype), tuple(operators or ()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{base_dir}: its recorded model is invalid ({error!r})") from error
