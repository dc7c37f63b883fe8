"""Distribution of requests from rank 0 to all ranks.

The model may be sharded over many ranks, and all of them compute each answer. Tasks, data sets and
lm-evaluation-harness are loaded on rank 0 only, which broadcasts commands as plain data.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.evaluate.inference_model import InferenceModel
from hlat.parallelism.process_group import ProcessGroup, broadcast_object

ScoreRequest = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""
_REQUESTS_PER_BATCH = 2048
"""Requests per broadcast."""


class Rank0Scheduler:
    """Rank 0's side of an evaluation; a context manager that ends the worker loops at exit.

    After KeyboardInterrupt the exit does not broadcast, since the signal has ended all other ranks.
    """

    def __init__(
        self, model: InferenceModel, tokenizer: PromptTokenizer, world_group: ProcessGroup
    ) -> None:
        self._model, self.tokenizer, self._world_group = model, tokenizer, world_group

    def __enter__(self) -> "Rank0Scheduler":
        return self

    def __exit__(self, exception: type[BaseException] | None, *details: object) -> None:
        if exception is None or not issubclass(exception, KeyboardInterrupt):
            self.dispatch("end")

    def score(
        self, requests: Sequence[ScoreRequest], progress: Callable[[int], object] = lambda _: None
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and True if it is the greedy one.

        Requests are sorted, so that a batch shares prefixes. `progress` is called with the number
        of requests of each finished batch.
        """
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i])
        for indices in _split_into_batches(order):
            batch = [requests[i] for i in indices]
            self.dispatch("score", requests=batch)
            for i, score in zip(indices, self._model.score(batch), strict=True):
                scores[i] = score
            progress(len(indices))
        return scores

    def generate(
        self,
        contexts: Sequence[list[int]],
        stop_sequences: Sequence[str],
        options: dict[str, Any],
        progress: Callable[[int], object] = lambda _: None,
    ) -> list[list[int]]:
        """Return the generated token ids of each context.

        Args:
            contexts: Token ids.
            stop_sequences: Strings that end a sequence, as the end-of-document token does.
            options: `max_new_tokens`, `temperature`, `top_p` and `seed`.
            progress: Called with the number of sequences of each finished batch.
        """
        generated: list[list[int]] = [[]] * len(contexts)
        order = sorted(range(len(contexts)), key=lambda i: contexts[i])
        for indices in _split_into_batches(order):
            arguments: dict[str, Any] = {
                "sample_ids": indices,
                "prompts": [contexts[i] for i in indices],
                "stop_sequences": [*stop_sequences],
                "options": options,
            }
            self.dispatch("generate", **arguments)
            batch = _generate(self._model, self.tokenizer, **arguments)
            for i, ids in zip(indices, batch, strict=True):
                generated[i] = ids
            progress(len(indices))
        return generated

    def wait(self, seconds: float) -> None:
        """Sleep, and restart the timeout of the broadcast in which the other ranks wait."""
        self.dispatch("wait")
        time.sleep(seconds)

    def dispatch(self, command: str, **arguments: Any) -> None:
        """Broadcast a command to the worker loops."""
        broadcast_object(self._world_group, {"command": command, **arguments})


def run_worker_loop(
    model: InferenceModel,
    tokenizer: PromptTokenizer,
    world_group: ProcessGroup,
    handlers: dict[str, Callable[..., Any]],
) -> None:
    """Execute rank 0's commands until `end`; `handlers` contains functions for further commands."""
    while (arguments := broadcast_object(world_group, None))["command"] != "end":
        command = arguments.pop("command")
        if command == "score":
            model.score(arguments["requests"])
        elif command == "generate":
            _generate(model, tokenizer, **arguments)
        elif command != "wait":
            handlers[command](**arguments)


def _generate(
    model: InferenceModel,
    tokenizer: PromptTokenizer,
    sample_ids: Sequence[int],
    prompts: Sequence[list[int]],
    stop_sequences: Sequence[str],
    options: dict[str, Any],
) -> list[list[int]]:
    # A token has at least one byte; up to three more may belong to a truncated character
    num_tail_tokens = max((len(stop.encode()) for stop in stop_sequences), default=0) + 4

    def is_finished(ids: list[int]) -> bool:
        if ids[-1] == tokenizer.eos_token_id:
            return True
        text = tokenizer.decode(ids[-num_tail_tokens:])
        return any(stop in text for stop in stop_sequences)

    return model.generate(prompts, is_finished=is_finished, sample_ids=sample_ids, **options)


def _split_into_batches(order: list[int]) -> list[list[int]]:
    size = _REQUESTS_PER_BATCH
    return [order[start : start + size] for start in range(0, len(order), size)]
