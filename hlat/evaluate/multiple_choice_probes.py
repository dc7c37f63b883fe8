"""Multiple-choice questions that a run evaluates during training.

A few dozen questions about the domain of interest show the step at which the model learns it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.data.tokenizer import Tokenizer
from hlat.evaluate import answer_bits
from hlat.evaluate.answer_bits import compute_answer_bits
from hlat.inference.inference_model import InferenceModel


@dataclass(frozen=True)
class MultipleChoiceQuestion:
    """Context with several continuations.

    Attributes:
        choices: Token ids of the context, after the token that precedes a document in training, BOS
            or else EOS, and of the continuation, by choice.
        num_characters: Characters of each choice.
        answer: Index of the correct choice.
        answer_text: Text of the correct choice.
    """

    choices: list[tuple[list[int], list[int]]]
    num_characters: list[int]
    answer: int
    answer_text: str


def load_probes(config: Config) -> dict[str, list[MultipleChoiceQuestion]]:
    """Return the questions of `evaluation.probes` by name; raise ConfigError for invalid files."""
    if not config.evaluation.probes:
        return {}
    data = config.data
    tokenizer = Tokenizer(
        *(data.tokenizer, data.root, data.eos_token),
        bos_token=data.bos_token,
        max_lost_text=data.max_lost_text,
    )
    return {
        name: _load_questions(
            f"evaluation.probes.{name}", Path(data.root).expanduser() / file, tokenizer
        )
        for name, file in config.evaluation.probes.items()
    }


def evaluate_probes(
    model: InferenceModel, probes: Mapping[str, Sequence[MultipleChoiceQuestion]]
) -> dict[str, dict[str, float]]:
    """Return `accuracy`, the fraction of correct answers, and `answer_bits_per_byte` by probe.

    The answer of the model is the choice with the highest log-probability per character, as
    acc_norm of lm-evaluation-harness, so that long choices have no disadvantage.
    """
    accuracy, bits_per_byte = {}, {}
    for name, questions in probes.items():
        scores = iter(model.score([pair for question in questions for pair in question.choices]))
        num_correct, bits = 0, []
        for question in questions:
            log_probs = [next(scores)[0] for _ in question.choices]
            normalized = np.array(log_probs) / question.num_characters
            num_correct += int(np.argmax(normalized)) == question.answer
            bits.append(compute_answer_bits(log_probs[question.answer], question.answer_text))
        accuracy[name], bits_per_byte[name] = num_correct / len(questions), fmean(bits)
    return {"accuracy": accuracy, answer_bits.METRIC: bits_per_byte}


def _load_questions(key: str, path: Path, tokenizer: Tokenizer) -> list[MultipleChoiceQuestion]:
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={path} cannot be read ({error}); give a file of JSON lines, each with context, "
            "choices and answer"
        ) from error
    rows = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not rows:
        raise ConfigError(f"{key}={path} contains no question; remove it, or add questions")
    return [_parse_question(f"{key}={path}, line {n}", line, tokenizer) for n, line in rows.items()]


def _parse_question(location: str, line: str, tokenizer: Tokenizer) -> MultipleChoiceQuestion:
    try:
        row = json.loads(line)
        context, choices, answer = row["context"], row["choices"], row["answer"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{location}: {error!r}; a question is an object with context, choices and answer"
        ) from error
    if not isinstance(context, str) or not context.strip():
        raise ConfigError(f"{location}: context={context!r}; give the text before the choices")
    is_valid = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not is_valid or len(choices) < 2:
        raise ConfigError(f"{location}: choices={choices!r}; give two texts or more")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ConfigError(
            f"{location}: answer={answer!r} and {len(choices)} choices; use the index of the "
            f"correct one, 0 to {len(choices) - 1}"
        )
    # As in the harness, spaces at the end of the context are scored as a part of the choice
    texts = [context.rstrip(), *(context + choice for choice in choices)]
    prefix, *sequences = tokenizer.encode_chunks(texts)
    pairs = []
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    for ids in sequences:  # a token that spans the boundary belongs to the choice
        split = min(len(prefix), len(ids) - 1)
        pairs.append(([start, *ids[:split].tolist()], ids[split:].tolist()))
    num_characters = [len(choice) for choice in choices]
    return MultipleChoiceQuestion(pairs, num_characters, answer, choices[answer])
