"""Settings of lm-evaluation-harness for the tasks of an evaluation, under the harness's names."""

import argparse
import ast
import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.config.argument_parser import build_list_parser, parse_positive_int
from hlat.config.config_errors import raise_config_errors

DEFAULT_SEEDS = (0, 1234, 1234, 1234)
"""Default seeds of the harness: Python, NumPy, torch, and the few-shot examples."""
_GENERATION_SETTINGS = {
    *("until", "do_sample", "temperature", "top_p"),
    *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
}
_NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "no_repeat_ngram_size": (None, 0),
}
"""Values of other settings that change no text."""


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of the harness.

    Attributes:
        apply_chat_template: Format prompts with the chat template, or with that of a name.
        system_instruction: Text of the system message, or before a prompt without a template.
        fewshot_as_multiturn: Few-shot examples are separate messages; None: with a template.
        gen_kwargs: Settings of generation, which replace those of a task.
        seed: Seeds of Python, NumPy and torch, and of the few-shot examples. Generation uses that
            of torch.
        doc_ids: Indices of the evaluated documents by task; all documents of other tasks.
        max_length: Maximum tokens of a prompt and its continuation; None: those of the model.
    """

    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: tuple[int, ...] = DEFAULT_SEEDS
    doc_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    max_length: int | None = None

    @property
    def is_multiturn(self) -> bool:
        """Return True if few-shot examples are separate messages."""
        if self.fewshot_as_multiturn is None:
            return bool(self.apply_chat_template)
        return self.fewshot_as_multiturn

    def to_dict(self) -> dict[str, Any]:
        """Return the settings without those that have their default value, as JSON values."""
        values = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != getattr(HarnessSettings(), each.name)
        }
        fields: dict[str, Any] = json.loads(json.dumps(values))
        return fields

    def to_config(self) -> dict[str, Any]:
        """Return all settings as JSON values, under the keys of the harness's results file."""
        seeds = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
        return {
            **dict(zip(seeds, self.seed, strict=True)),
            "gen_kwargs": dict(self.gen_kwargs) or None,
            "samples": {name: [*ids] for name, ids in self.doc_ids.items()} or None,
            "apply_chat_template": self.apply_chat_template,
            "system_instruction": self.system_instruction,
            "fewshot_as_multiturn": self.is_multiturn,
        }

    def select_tasks(self, names: Collection[str]) -> "HarnessSettings":
        """Return the settings with the indices of the given tasks only."""
        doc_ids = {name: ids for name, ids in self.doc_ids.items() if name in names}
        return dataclasses.replace(self, doc_ids=doc_ids)

    def validate(self, limit: int | None) -> None:
        """Raise ConfigError for settings that contradict each other or are not supported."""
        problems = _find_unsupported(self.gen_kwargs)
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            problems.append("fewshot_as_multiturn=true needs apply_chat_template=true")
        if self.doc_ids and limit is not None:
            problems.append(f"doc_ids= and limit={limit} both select documents; remove one")
        raise_config_errors(problems)


def validate_generation_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of generation that the engines do not support."""
    problems = _find_unsupported(settings)
    if settings.get("do_sample") and not float(settings.get("temperature") or 0.0) > 0:
        problems.append("do_sample=true needs a temperature above 0; set do_sample=false")
    raise_config_errors(problems)


def _find_unsupported(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={value} is not supported; supported: {', '.join(sorted(_GENERATION_SETTINGS))}"
        for key, value in settings.items()
        if key not in _GENERATION_SETTINGS and value not in _NEUTRAL_SETTINGS.get(key, (None,))
    ]


def parse_chat_template(text: str) -> bool | str:
    """Return True, False, or the name of a template."""
    return parse_bool(text) if text in ("true", "false") else text


def parse_bool(text: str) -> bool:
    """Return a boolean, or raise argparse.ArgumentTypeError."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text == "true"


def parse_gen_kwargs(text: str) -> dict[str, Any]:
    """Return settings of generation from `key=value,key=value` or a JSON object."""
    if text.startswith("{"):
        return _parse_json_object(text, text)
    settings = {}
    for part in re.split(r",(?=\w+=)", text):
        key, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(
                f"{part} is not of the form key=value; such as temperature=0.7,do_sample=true"
            )
        settings[key] = _parse_value(value)
    return settings


def parse_seed(text: str) -> tuple[int, ...]:
    """Return four seeds from one or four numbers."""
    numbers = [item.strip() for item in build_list_parser(str)(text)]
    is_valid = all(item.isascii() and item.isdigit() and len(item) < 10 for item in numbers)
    if not is_valid or len(numbers) not in (1, len(DEFAULT_SEEDS)):
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number nor four numbers: Python, NumPy, torch, few-shot examples"
        )
    return tuple(map(int, numbers * (len(DEFAULT_SEEDS) // len(numbers))))


def parse_doc_ids(text: str) -> dict[str, tuple[int, ...]]:
    """Return the indices by task of a JSON object, or of a file with one."""
    content = text
    if not text.startswith("{"):
        try:
            content = Path(text).expanduser().read_text()
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{text} cannot be read ({error})") from error
    doc_ids = {}
    for task, indices in _parse_json_object(content, text).items():
        if not isinstance(indices, list) or not indices or not all(map(_is_index, indices)):
            raise argparse.ArgumentTypeError(
                f"{task}: {json.dumps(indices)} is not a list of indices from 0, such as [0, 3]"
            )
        doc_ids[task] = tuple(sorted(set(indices)))
    return doc_ids


def parse_num_samples(text: str) -> int:
    """Return the samples of each function of HumanEval."""
    if text.startswith("{") or Path(text).is_file():
        raise argparse.ArgumentTypeError(
            "the number of samples of HumanEval is expected; select documents with doc_ids="
        )
    return parse_positive_int(text)


def _parse_json_object(content: str, label: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{label} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{label} is not a JSON object, such as {{"task": [0]}}')
    return value


def _parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0
