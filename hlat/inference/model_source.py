"""Weights and tokenizer of a run, checkpoint, average or Hugging Face directory."""

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from hlat.checkpoint import checkpoint_lookup, checkpoint_store, training_settings
from hlat.checkpoint.checkpoint_directory import format_step_name
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.checkpoint.hugging_face import pretrained_weights, weight_export
from hlat.checkpoint.hugging_face.pretrained_files import PretrainedFiles, load_pretrained_files
from hlat.checkpoint.training_checkpoint import WEIGHTS, find_weights_key
from hlat.checkpoint.training_state import TrainingState
from hlat.config import extensions, run_identity
from hlat.config.config_errors import ConfigError
from hlat.data import prompt_tokenizer
from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.distributed.state_shard import BUFFERS, StateShard
from hlat.inference import model_metadata
from hlat.inference.model_metadata import ModelMetadata
from hlat.storage import storage_path
from hlat.storage.durable_files import hash_file
from hlat.storage.storage_path import StoragePath
from hlat.tracking.run_directory import EVALUATIONS_DIR

_TRAINING_CHECKPOINT_DIRS = ("checkpoints", "milestones")
"""Subdirectories of a run with training states, in contrast to averages."""


@dataclass(frozen=True)
class ModelSource(ModelMetadata):
    """Model with its weights, in a checkpoint or a Hugging Face directory, and its tokenizer.

    `name` is that of the scores file. `config_yaml` is the configuration of the run, empty if it is
    unknown. `step` and `run_dir` are known for training states only, in contrast to averages and
    Hugging Face models. `pretrained_files` are those of the Hugging Face directory, or of
    model.init_from of a run. `weights_key` is the key of the weights in the checkpoint.
    """

    location: StoragePath
    name: str
    tokenizer: PromptTokenizer
    step: int | None = None
    tokens: int | None = None
    run_dir: Path | None = None
    config_yaml: str = ""
    pretrained_files: PretrainedFiles = field(default_factory=PretrainedFiles)
    weights_key: str = WEIGHTS

    @property
    def scores_path(self) -> Path:
        """Default path of the scores."""
        return self.base_dir / EVALUATIONS_DIR / f"{self.name}.json"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of weights, architecture, tokenizer and end tokens.

        The manifest of a checkpoint contains the hashes of its files. The weights of a Hugging Face
        directory are read.
        """
        digest = hashlib.sha256(f"{self.model} {self.tokenizer.sha256}".encode())
        digest.update(repr(sorted(self.tokenizer.end_token_ids)).encode())
        if self.weights_key != WEIGHTS:
            digest.update(self.weights_key.encode())
        if checkpoint_store.is_checkpoint(self.location):
            digest.update((self.location / COMMIT_MARKER).read_bytes())
        else:
            assert isinstance(self.location, Path)
            for file in sorted(self.location.glob("*.safetensors")):
                digest.update(hash_file(file).sha256.encode())
        return digest.hexdigest()

    def __post_init__(self) -> None:
        self.tokenizer.end_token_ids |= {*self.pretrained_files.end_token_ids}
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"{self.location}: its tokenizer has {self.tokenizer.vocab_size} ids, and the "
                f"embedding {self.model.vocab_size} rows; it was trained with another tokenizer"
            )

    def load_weights(self, shards: Iterable[StateShard]) -> None:
        """Load the weights into the shards of an engine."""
        if self.step is None and not checkpoint_store.is_checkpoint(self.location):
            pretrained_weights.load_pretrained(str(self.location), self.model, shards)
        else:
            shards = [*shards]
            weights = [
                replace(shard, name=f"{self.weights_key}/{shard.name.removeprefix('weights/')}")
                for shard in shards
                if shard.name.startswith("weights/")
            ]
            buffers = [shard for shard in shards if shard.name.startswith(f"{BUFFERS}/")]
            checkpoint_store.load_checkpoint(self.location, [*weights, *buffers])


def find_model(
    location: str,
    step: int | None = None,
    tokenizer_path: Path | None = None,
    uses_ema: bool = False,
) -> ModelSource:
    """Return the model at a location, with a warning for every newer checkpoint that is damaged.

    `step` selects a checkpoint of a run, by default the newest. `tokenizer_path` is the location of
    the run's tokenizer.json if it has moved. `uses_ema` selects the moving average of the weights.
    """
    source = storage_path.parse_storage_path(location)
    if isinstance(source, Path) and model_metadata.is_hugging_face_dir(source):
        if step is not None:
            raise ConfigError(f"{source} is a Hugging Face directory; step= needs a run")
        if uses_ema:
            raise ConfigError(f"{source} is a Hugging Face directory; ema=true needs a run")
        metadata = model_metadata.load_hugging_face_metadata(source)
        pretrained_weights.validate_pretrained(str(source), metadata.model)
        tokenizer = prompt_tokenizer.load_hugging_face_tokenizer(source)
        return ModelSource(
            **vars(metadata),
            location=source,
            name="scores",
            tokenizer=tokenizer,
            pretrained_files=load_pretrained_files(str(source), None, tokenizer.sha256),
        )
    checkpoint_dir, warnings = checkpoint_lookup.find_checkpoint(source, step)
    for warning in warnings:
        print(f"WARNING: {warning}", file=sys.stderr)
    return open_checkpoint(checkpoint_dir, source, tokenizer_path, uses_ema)


def open_checkpoint(
    checkpoint_dir: StoragePath,
    source: StoragePath,
    tokenizer_path: Path | None = None,
    uses_ema: bool = False,
) -> ModelSource:
    """Return the model of a checkpoint without verification of its weights.

    `source` is the location given by the user: the run or the checkpoint. `tokenizer_path` is the
    location of the run's tokenizer.json if it has moved. The scores of the moving average are in a
    separate file, as those of an average of checkpoints.
    """
    state = TrainingState.from_json(checkpoint_store.load_state_json(checkpoint_dir))
    model = run_identity.build_saved_model_config(state.fixed, state.config)
    for message in extensions.find_changed(state.adjustable):
        print(f"WARNING: {message}", file=sys.stderr)
    weight_export.validate_weights_match(checkpoint_dir, model)
    settings = training_settings.parse_training_settings(checkpoint_dir, state)
    run_dir = training_settings.find_run_dir(source, checkpoint_dir)
    tokenizer_file = training_settings.find_tokenizer(
        tokenizer_path, checkpoint_dir, run_dir, settings.tokenizer_sha256
    )
    if run_dir is not None and not model_metadata.is_run_dir(run_dir):
        run_dir = None
    is_state = checkpoint_dir.parent.name in _TRAINING_CHECKPOINT_DIRS and not uses_ema
    name = format_step_name(state.step) if is_state else checkpoint_dir.name
    return ModelSource(
        location=checkpoint_dir,
        name=f"{name}_ema" if uses_ema else name,
        base_dir=run_dir or (checkpoint_dir.parent if isinstance(checkpoint_dir, Path) else Path()),
        model=model,
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        fp32_operators=tuple(state.adjustable.get("precision.fp32_operators") or ()),
        tokenizer=prompt_tokenizer.load_run_tokenizer(
            tokenizer_file, settings.eos_token, settings.bos_token
        ),
        step=state.step if is_state else None,
        tokens=state.tokens,
        run_dir=run_dir if is_state else None,
        config_yaml=state.config,
        pretrained_files=load_pretrained_files(model.init_from, run_dir, settings.tokenizer_sha256),
        weights_key=find_weights_key(state, checkpoint_dir, uses_ema),
    )
