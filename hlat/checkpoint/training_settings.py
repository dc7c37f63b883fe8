"""Settings and tokenizer that a checkpoint was trained with, for exports and evaluations.

The settings are part of the checkpoint. The tokenizer file is located by its hash, because a model
with another tokenizer than it was trained with generates nonsense.
"""

from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.hugging_face.tokenizer_files import find_tokenizer_file
from hlat.checkpoint.training_state import TrainingState
from hlat.config.config_errors import ConfigError
from hlat.config.precision import Dtype
from hlat.config.recorded_config import load_recorded_settings
from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.storage.storage_path import StoragePath


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the run that saved a checkpoint; `dtype` is that of weights in a forward pass."""

    sequence_length: int
    eos_token: str
    bos_token: str | None
    tokenizer_sha256: str
    dtype: Dtype


def parse_training_settings(checkpoint: StoragePath, state: TrainingState) -> TrainingSettings:
    """Return the settings recorded in the state of a checkpoint.

    Raises:
        ConfigError: If one of them is missing or invalid.
    """
    try:
        data = state.data["fingerprint"]
        length, dtype = data["batch.sequence_length"], state.adjustable["precision.param_dtype"]
        eos_token, sha256 = data["data.eos_token"], data["data.tokenizer"]
        bos_token = data.get("data.bos_token")
        if type(length) is not int or not isinstance(eos_token + sha256 + (bos_token or ""), str):
            raise TypeError(
                f"sequence length {length!r}, eos_token {eos_token!r}, bos_token {bos_token!r}"
            )
        return TrainingSettings(length, eos_token, bos_token, sha256, Dtype(dtype))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{checkpoint}: state.json lacks valid training settings ({error!r})"
        ) from error


def find_run_dir(source: StoragePath, checkpoint: StoragePath) -> Path | None:
    """Return the directory of the run that saved a checkpoint; None if it is remote.

    `source` is the run or checkpoint directory that the user named.
    """
    if isinstance(source, Path) and (source / "config.yaml").is_file():
        return source.absolute()
    return checkpoint.absolute().parent.parent if isinstance(checkpoint, Path) else None


def find_tokenizer(
    tokenizer_file: Path | None, checkpoint: StoragePath, run_dir: Path | None, sha256: str
) -> Path:
    """Find the tokenizer.json that a checkpoint was trained with.

    `tokenizer_file`, the value of tokenizer=, takes precedence over the run's configuration. A
    relative path in the configuration is resolved against the working directory and the parents of
    the run directory, one of which the run was started in.

    Raises:
        ConfigError: If no candidate exists with this hash.
    """
    if tokenizer_file is not None:
        description, candidates = f"tokenizer={tokenizer_file}", [tokenizer_file.expanduser()]
    elif run_dir is not None and (run_dir / "config.yaml").is_file():
        path = _load_tokenizer_path(run_dir)
        description = f"data.tokenizer={path}"
        candidates = [EMBEDDED_FILE, *(base / path for base in (Path.cwd(), *run_dir.parents))]
    else:
        description = "the embedded one, used without the run's config.yaml,"
        candidates = [EMBEDDED_FILE]
    if (file := find_tokenizer_file(sha256, candidates)) is None:
        raise ConfigError(
            f"{checkpoint} was trained with the tokenizer.json of sha256 {sha256}; {description} "
            "differs or does not exist; specify the file with tokenizer=FILE"
        )
    return file


def _load_tokenizer_path(run_dir: Path) -> Path:
    try:
        root, name = load_recorded_settings(run_dir, "data.root", "data.tokenizer")
        return Path(root).expanduser() / Path(name).expanduser()
    except ConfigError as error:
        raise ConfigError(f"{error}; use tokenizer=FILE") from error
    except TypeError as error:
        raise ConfigError(
            f"{run_dir / 'config.yaml'} sets no tokenizer ({error}); use tokenizer=FILE"
        ) from error
