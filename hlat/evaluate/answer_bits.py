"""Bits per byte of the correct answers of multiple-choice questions.

Accuracy changes when the order of the choices does, and remains at chance for small models. The
log-likelihood of the correct answer improves from the first steps on (OLMES, arXiv 2406.08446;
Bhagia et al., arXiv 2412.04403).
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

METRIC = "answer_bits_per_byte"


def compute_answer_bits(log_likelihood: float, answer: str) -> float:
    """Return the bits per UTF-8 byte of an answer, given its log-likelihood in nats.

    The space between question and answer is a byte of the answer, as the model predicts it.
    """
    return -log_likelihood / math.log(2) / len(answer.encode())


def summarize_samples(samples: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the mean bits per byte over the questions of a harness task, and its standard error.

    None: the task has no choices, or does not state the index of the correct one.

    Args:
        samples: Items of a task, as of `lm_eval --log_samples`.
    """
    first_filter = samples[0]["filter"] if samples else None
    questions = [sample for sample in samples if sample["filter"] == first_filter]
    bits = [*map(_compute_sample_bits, questions)]
    known = [value for value in bits if value is not None]
    if not known or len(known) < len(bits):
        return None
    return fmean(known), stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan


def _compute_sample_bits(sample: Mapping[str, Any]) -> float | None:
    arguments, answer = sample["arguments"], sample["target"]
    is_index = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_index or len(arguments) < 2 or not 0 <= answer < len(arguments):
        return None
    continuation, response = arguments[answer][1], sample["resps"][answer][0]
    if not isinstance(continuation, str) or not continuation or not isinstance(response, tuple):
        return None
    return compute_answer_bits(float(response[0]), continuation)
