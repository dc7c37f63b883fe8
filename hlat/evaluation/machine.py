"""The engine that answers for a model: any that can hold it, whatever the model was trained on.

A checkpoint knows no layout, so a model that took a cluster to train is evaluated on what there is.
What is chosen here is no run: nothing is trained, and nothing of a training recipe but what the
forward pass reads is kept.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from hlat.config.compose import composed
from hlat.config.errors import ConfigError
from hlat.config.precision import Dtype
from hlat.config.resolve import resolve, typed
from hlat.config.run import Config
from hlat.evaluation.outline import Outline
from hlat.tracking.run_folder import EVALUATIONS

GROUPS = ("hardware", "parallelism", "engine", "compiler", "precision")
"""What may be chosen; all else is the model's."""
_RECIPES = {Dtype.fp32: "fp32", Dtype.bf16: "bf16"}


def configure(outline: Outline, overrides: Sequence[str]) -> Config:
    """The configuration of an engine for a model.

    Args:
        outline: The model.
        overrides: What the user chose, as `python -m hlat.train` takes it.

    Raises:
        ConfigError: A choice does not exist, does not fit the model, or is none to be made.
    """
    if wrong := [word for word in overrides if group(word) not in GROUPS]:
        raise ConfigError(
            *(
                f"{word} is no choice in an evaluation; the model says it, or nothing reads it: "
                f"choose among {', '.join(GROUPS)}"
                for word in wrong
            )
        )
    recipe = [] if any(word.startswith("precision=") for word in overrides) else _recipe(outline)
    words = ["recovery=desk", *_of_model(outline), *recipe, *overrides]
    config = typed(composed(words))
    layout = config.parallelism
    replicas = max(1, config.num_processes // max(1, layout.tp * layout.pp))
    # A batch that the rules accept; texts are batched by what they hold
    batch = [f"batch.global_batch_size={replicas * layout.pp}", "batch.micro_batch_size=1"]
    return resolve(composed([*words, *batch]))


def assumed(overrides: Sequence[str]) -> Config:
    """The same of a model of which nothing is known here; whether it fits is left to the job.

    Raises:
        ConfigError: A choice does not exist.
    """
    return typed(composed(["recovery=desk", f"run.name={EVALUATIONS}", *overrides]))


def group(word: str) -> str:
    """The group of the configuration that an override is about."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


def _of_model(outline: Outline) -> list[str]:
    """The model's settings, and where its scores are kept."""
    fields = {
        name: value
        for name, value in vars(outline.model).items()
        if name not in ("name", "init_from", "init_copies")
    }
    return [
        *(f"model.{name}={_text(value)}" for name, value in fields.items()),
        f"batch.sequence_length={outline.positions}",
        f"run.root={_quoted(str(outline.home))}",
        f"run.name={EVALUATIONS}",
    ]


def _recipe(outline: Outline) -> list[str]:
    """What the forward pass of its training read, without what updated it."""
    operators = ",".join(outline.fp32_operators) if outline.dtype is Dtype.bf16 else ""
    return [f"precision={_RECIPES[outline.dtype]}", f"precision.fp32_operators=[{operators}]"]


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value).lower()


def _quoted(text: str) -> str:
    """A text as an override takes it, whatever is in it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
