"""Weights and tokenizer of a run, checkpoint, average or Hugging Face directory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import (
    checkpoint_lookup,
    checkpoint_store,
    hugging_face_export,
    pretrained_weights,
    training_settings,
)
from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config import run_identity
from hlat.config.config_errors import ConfigError
from hlat.data import prompt_tokenizer
from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.evaluate import model_metadata
from hlat.evaluate.model_metadata import ModelMetadata
from hlat.storage import storage_path
from hlat.storage.storage_path import StoragePath
from hlat.training_state import TrainingState

_TRAINING_CHECKPOINT_DIRS = ("checkpoints", "milestones")
"""Subdirectories of a run with training states, in contrast to averages."""


@dataclass(frozen=True)
class ModelSource(ModelMetadata):
    """Model with its weights and its tokenizer.

    Attributes:
        location: Checkpoint or Hugging Face directory of the weights.
        name: Name of the scores file.
        tokenizer: Tokenizer of the model.
        step: Optimizer steps of a training state; None for averages and Hugging Face models.
        tokens: Training tokens; None: unknown.
        run_dir: Local directory of the run, of a training state.
    """

    location: StoragePath
    name: str
    tokenizer: PromptTokenizer
    step: int | None = None
    tokens: int | None = None
    run_dir: Path | None = None

    def load_weights(self, chunks: Iterable[TensorChunk]) -> None:
        """Load the weights into the chunks of an engine.

        Raises:
            ConfigError: The weights do not match the model.
        """
        if self.step is None and not checkpoint_store.is_checkpoint(self.location):
            pretrained_weights.load_pretrained(str(self.location), self.model, chunks)
        else:
            weights = [chunk for chunk in chunks if chunk.name.startswith("weights/")]
            checkpoint_store.load_checkpoint(self.location, weights)


def find_model(
    location: str,
    step: int | None = None,
    tokenizer_path: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> ModelSource:
    """Return the model at a location.

    Args:
        location: Directory or URL of a run or a checkpoint, or a Hugging Face directory.
        step: Checkpoint of the run; None: the newest.
        tokenizer_path: Location of the run's tokenizer.json if it has moved.
        warn: Called with the defect of every newer checkpoint that was rejected.

    Raises:
        ConfigError: The model does not exist, or is corrupt.
    """
    source = storage_path.parse_storage_path(location)
    if isinstance(source, Path) and model_metadata.is_hugging_face_dir(source):
        if step is not None:
            raise ConfigError(f"{source} is a Hugging Face directory; --step needs a run")
        return open_hugging_face(source)
    checkpoint_dir, warnings = checkpoint_lookup.find_checkpoint(source, step)
    for warning in warnings:
        warn(warning)
    return open_checkpoint(checkpoint_dir, source, tokenizer_path)


def open_checkpoint(
    checkpoint_dir: StoragePath, source: StoragePath, tokenizer_path: Path | None = None
) -> ModelSource:
    """Return the model of a checkpoint without verification of its weights.

    Args:
        checkpoint_dir: Directory of the checkpoint.
        source: Location given by the user: the run or the checkpoint.
        tokenizer_path: Location of the run's tokenizer.json if it has moved.

    Raises:
        ConfigError: The state of the checkpoint is invalid, or its tokenizer is missing.
    """
    state = TrainingState.from_json(checkpoint_store.load_state_json(checkpoint_dir))
    model = run_identity.build_saved_model_config(state.fixed)
    hugging_face_export.validate_weights_match(checkpoint_dir, model)
    settings = training_settings.parse_training_settings(checkpoint_dir, state)
    run_dir = training_settings.find_run_dir(source, checkpoint_dir)
    tokenizer_file = training_settings.find_tokenizer(
        tokenizer_path, checkpoint_dir, run_dir, settings.tokenizer_sha256
    )
    if run_dir is not None and not model_metadata.is_run_dir(run_dir):
        run_dir = None
    is_state = checkpoint_dir.parent.name in _TRAINING_CHECKPOINT_DIRS
    return _validate_vocab_size(
        ModelSource(
            location=checkpoint_dir,
            name=checkpoint_store.format_step_name(state.step) if is_state else checkpoint_dir.name,
            base_dir=run_dir or (checkpoint_dir if isinstance(checkpoint_dir, Path) else Path()),
            model=model,
            sequence_length=settings.sequence_length,
            dtype=settings.dtype,
            fp32_operators=tuple(state.adjustable.get("precision.fp32_operators") or ()),
            tokenizer=prompt_tokenizer.load_run_tokenizer(tokenizer_file, settings.eos_token),
            step=state.step if is_state else None,
            tokens=state.tokens,
            run_dir=run_dir if is_state else None,
        )
    )


def open_hugging_face(directory: Path) -> ModelSource:
    """Return the model of a Hugging Face directory.

    Raises:
        ConfigError: The model is not a Llama that an engine supports, or its tokenizer is missing.
    """
    metadata = model_metadata.load_hugging_face_metadata(directory)
    pretrained_weights.validate_pretrained(str(directory), metadata.model)
    return _validate_vocab_size(
        ModelSource(
            **vars(metadata),
            location=directory,
            name="scores",
            tokenizer=prompt_tokenizer.load_hugging_face_tokenizer(directory),
        )
    )


def _validate_vocab_size(source: ModelSource) -> ModelSource:
    if source.tokenizer.vocab_size > source.model.vocab_size:
        raise ConfigError(
            f"{source.location}: its tokenizer has {source.tokenizer.vocab_size} ids, and the "
            f"embedding {source.model.vocab_size} rows; it was trained with another tokenizer"
        )
    return source
