"""Multiple-choice questions of the user's own, asked while a run goes on.

The benchmarks of a field are for afterwards; a few dozen questions about what a model is to learn
show beside the loss when it learns it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.data.tokenizer import Tokenizer
from hlat.evaluation.text_model import TextModel


@dataclass(frozen=True)
class Question:
    """A beginning and its possible ends.

    Attributes:
        texts: For each end, token ids of the beginning, behind an eos as documents are in training,
            and of the end.
        num_bytes: UTF-8 bytes of each end.
        answer: Which of them is right.
    """

    texts: list[tuple[list[int], list[int]]]
    num_bytes: list[int]
    answer: int


def read(config: Config) -> dict[str, list[Question]]:
    """The questions of `evaluation.probes` by name.

    Raises:
        ConfigError: A file cannot be read, or a line is no question.
    """
    if not config.evaluation.probes:
        return {}
    data = config.data
    tokenizer = Tokenizer(data.tokenizer, data.root, data.eos_token)
    return {
        name: _read(f"evaluation.probes.{name}", Path(data.root).expanduser() / file, tokenizer)
        for name, file in config.evaluation.probes.items()
    }


def accuracy(model: TextModel, probes: Mapping[str, Sequence[Question]]) -> dict[str, float]:
    """Share of questions, by probe, of which the right end is the likeliest per byte.

    Per byte, as lm-evaluation-harness's acc_norm: a long end is not less likely for its length.
    """
    found = {}
    for name, questions in probes.items():
        scores = iter(model.score([text for question in questions for text in question.texts]))
        right = 0
        for question in questions:
            per_byte = [next(scores)[0] / count for count in question.num_bytes]
            right += int(np.argmax(per_byte)) == question.answer
        found[name] = right / len(questions)
    return found


def _read(key: str, path: Path, tokenizer: Tokenizer) -> list[Question]:
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={path} cannot be read ({error}); name a file of JSON lines, each with context, "
            "choices and answer"
        ) from error
    rows = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not rows:
        raise ConfigError(f"{key}={path} holds no question; leave it out, or write some")
    return [_question(f"{key}={path}, line {n}", line, tokenizer) for n, line in rows.items()]


def _question(place: str, line: str, tokenizer: Tokenizer) -> Question:
    try:
        row = json.loads(line)
        context, choices, answer = row["context"], row["choices"], row["answer"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{place}: {error!r}; a question is an object with context, choices and answer"
        ) from error
    _check(place, context, choices, answer)
    begun, *whole = tokenizer.encode_pieces([context, *(context + choice for choice in choices)])
    texts = []
    for ids in whole:  # where the two share a token it is the end's
        cut = min(len(begun), len(ids) - 1)
        texts.append(([tokenizer.eos, *ids[:cut].tolist()], ids[cut:].tolist()))
    return Question(texts, [len(choice.encode()) for choice in choices], answer)


def _check(place: str, context: Any, choices: Any, answer: Any) -> None:
    """Refuse what is no question.

    Raises:
        ConfigError: With the field that is none.
    """
    if not isinstance(context, str) or not context:
        raise ConfigError(f"{place}: context={context!r}; write the text before the choices")
    texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not texts or len(choices) < 2:
        raise ConfigError(f"{place}: choices={choices!r}; write two texts or more")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ConfigError(
            f"{place}: answer={answer!r} and {len(choices)} choices; use the number of the right "
            f"one, 0 to {len(choices) - 1}"
        )
