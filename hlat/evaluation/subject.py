"""What is evaluated: a run, one of its checkpoints, an average or a Hugging Face folder.

Whatever it is, it has a model, a tokenizer and weights that any engine in any layout can be filled
with; and a place where its scores belong.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import export, lookup, places, pretrained, store, trained_with
from hlat.checkpoint.chunk import Chunk
from hlat.checkpoint.places import Place
from hlat.config import identity
from hlat.config.errors import ConfigError
from hlat.data import prompts
from hlat.data.prompts import Prompts
from hlat.evaluation import outline
from hlat.evaluation.outline import Outline
from hlat.state import TrainingState

_TRAINING = ("checkpoints", "milestones")
"""Folders of a run whose checkpoints are its states at some step, as averages are not."""


@dataclass(frozen=True)
class Subject(Outline):
    """A model with its weights and its tokenizer.

    Attributes:
        location: Where the weights are.
        name: Under which its scores are kept.
        prompts: Its tokenizer.
        step: Optimizer steps, of a state of a run; None: it is none.
        tokens: Tokens that it has seen; None: not known.
        run: Folder of the run of which it is a state, if that is on this machine.
    """

    location: Place
    name: str
    prompts: Prompts
    step: int | None = None
    tokens: int | None = None
    run: Path | None = None

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Fill the weights among the chunks of an engine.

        Raises:
            ConfigError: They are not those of the model.
        """
        if self.step is None and not store.is_checkpoint(self.location):
            pretrained.fill(str(self.location), self.model, chunks)
        else:
            weights = [chunk for chunk in chunks if chunk.name.startswith("weights/")]
            store.restore(self.location, weights)


def find(
    location: str,
    step: int | None = None,
    tokenizer: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Subject:
    """The model that a user names.

    Args:
        location: Folder or URL of a run or a checkpoint, or a Hugging Face folder.
        step: Checkpoint of the run; None: the newest.
        tokenizer: The run's tokenizer.json, if it has moved.
        warn: Hears of every newer checkpoint that was refused.

    Raises:
        ConfigError: There is no such model, or it cannot be trusted.
    """
    source = places.at(location)
    if isinstance(source, Path) and outline.is_hugging_face(source):
        if step is not None:
            raise ConfigError(f"{source} is a Hugging Face folder; --step chooses from a run's")
        return of_folder(source)
    checkpoint, refused = lookup.find(source, step)
    for reason in refused:
        warn(reason)
    return of_checkpoint(checkpoint, source, tokenizer)


def of_checkpoint(checkpoint: Place, source: Place, tokenizer: Path | None = None) -> Subject:
    """The model that a checkpoint holds, which is taken to be what was written.

    Args:
        checkpoint: Its folder.
        source: What the user named: the run, or the checkpoint.
        tokenizer: The run's tokenizer.json, if it has moved.

    Raises:
        ConfigError: What it says of itself is not so, or its tokenizer is not found.
    """
    state = TrainingState.from_json(store.load_state(checkpoint))
    model = identity.model(state.fixed)
    export.refuse_other_weights(checkpoint, model)
    known = trained_with.circumstances(checkpoint, state)
    run = trained_with.run_folder(source, checkpoint)
    file = trained_with.tokenizer(tokenizer, checkpoint, run, known.tokenizer_sha256)
    is_state = checkpoint.parent.name in _TRAINING
    folder = run if run is not None and outline.is_run(run) else None
    home = folder or (checkpoint if isinstance(checkpoint, Path) else Path())
    return _refusing_more_ids(
        Subject(
            location=checkpoint,
            name=store.step_name(state.step) if is_state else checkpoint.name,
            home=home,
            model=model,
            positions=known.sequence_length,
            dtype=known.dtype,
            fp32_operators=tuple(state.adjustable.get("precision.fp32_operators") or ()),
            prompts=prompts.of_training(file, known.eos_token),
            step=state.step if is_state else None,
            tokens=state.tokens,
            run=folder if is_state else None,
        )
    )


def of_folder(folder: Path) -> Subject:
    """The model that a Hugging Face folder holds.

    Raises:
        ConfigError: It is not a Llama that an engine can be, or lacks its tokenizer.
    """
    known = outline.of_hugging_face(folder)
    pretrained.check(str(folder), known.model)
    return _refusing_more_ids(
        Subject(**vars(known), location=folder, name="scores", prompts=prompts.of_folder(folder))
    )


def _refusing_more_ids(subject: Subject) -> Subject:
    if subject.prompts.vocab_size > subject.model.vocab_size:
        raise ConfigError(
            f"{subject.location}: its tokenizer has {subject.prompts.vocab_size} ids, and the "
            f"embedding {subject.model.vocab_size} rows; it was trained with another tokenizer"
        )
    return subject
