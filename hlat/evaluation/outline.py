"""What is known of a model before any of it is read: enough to choose an engine for it.

Whoever only sends an evaluation away needs no more, and may have no torch; and a run that is to be
followed may have no checkpoint yet.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint import places
from hlat.checkpoint.manifest import MARKER
from hlat.config import recorded
from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.config.plain import from_plain
from hlat.config.precision import Dtype
from hlat.model import hugging_face

_KEYS = ("model", "batch.sequence_length", "precision.weights", "precision.fp32_operators")


@dataclass(frozen=True)
class Outline:
    """A model without its weights.

    Attributes:
        home: The folder in whose `evaluations` its scores are kept.
        model: Shape of the model.
        positions: Tokens of the longest text that it was trained on.
        dtype: Of the weights as the forward pass reads them.
        fp32_operators: Operators computed in fp32 all the same.
    """

    home: Path
    model: Model
    positions: int
    dtype: Dtype
    fp32_operators: tuple[str, ...]


def look(location: str) -> Outline | None:
    """What the folder of a model says of it; None: it is at a URL.

    Args:
        location: A run, one of its checkpoints, an average, or a Hugging Face folder.

    Raises:
        ConfigError: It is none of these.
    """
    folder = places.at(location)
    if not isinstance(folder, Path):
        return None
    if is_hugging_face(folder):
        return of_hugging_face(folder)
    for run in (folder, folder.absolute().parent.parent):
        if is_run(run):
            return of_run(run)
    if (folder / MARKER).is_file():
        text = json.loads((folder / "state.json").read_bytes())["config"]
        return _outline(folder, recorded.values(text, str(folder / "state.json"), *_KEYS))
    problem = (
        "is no run, checkpoint or Hugging Face folder" if folder.exists() else "does not exist"
    )
    raise ConfigError(f"{folder} {problem}; name a run's folder, such as runs/<run.name>")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run that has begun."""
    return (folder / "config.yaml").is_file()


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder holds a model as Hugging Face keeps it."""
    return (folder / "config.json").is_file() and not (folder / MARKER).exists()


def of_run(run: Path) -> Outline:
    """What a run's record says of its model.

    Raises:
        ConfigError: It has none that can be read.
    """
    return _outline(run.absolute(), recorded.settings(run, *_KEYS))


def of_hugging_face(folder: Path) -> Outline:
    """What config.json says of a model.

    Raises:
        ConfigError: It is not a Llama that an engine can be.
    """
    config = json.loads((folder / "config.json").read_bytes())
    model, positions, dtype = hugging_face.from_config(config, str(folder))
    # As transformers computes a Llama: its norm and the softmax of its attention
    return Outline(folder, model, positions, dtype, ("norm", "softmax"))


def _outline(home: Path, found: list[Any]) -> Outline:
    model, positions, dtype, operators = found
    try:
        shape = from_plain(Model, dict(model))
        return Outline(home, shape, int(positions), Dtype(dtype), tuple(operators or ()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{home}: its record says no model to go by ({error!r})") from error
