"""Distribution of commands from rank 0 to all ranks.

The model may be sharded over many ranks, and all of them compute each answer. Tasks, data sets and
lm-evaluation-harness are loaded on rank 0 only, which broadcasts commands as plain data.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.distributed.object_group import ObjectGroup, broadcast_object
from hlat.evaluate.request_cache import RequestCache
from hlat.inference.inference_model import InferenceModel, build_stop_check

ScoreRequest = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""
_REQUESTS_PER_BATCH = 2048
"""Requests per broadcast."""
_REQUESTS_PER_CACHED_BATCH = 256
"""Requests per broadcast with a cache, which saves the responses of each batch."""
_END = "end"


class CommandBroadcaster:
    """Commands that rank 0 starts and all ranks execute; a context manager on rank 0.

    The exit of the context ends the worker loops, except after KeyboardInterrupt, since the signal
    has ended all other ranks. `handlers` contains functions for further commands. `cache` contains
    responses of the loaded model, if there is one.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: PromptTokenizer,
        world_group: ObjectGroup,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.tokenizer, self._world_group = tokenizer, world_group
        self.cache: RequestCache | None = None
        self._handlers: dict[str, Callable[..., Any]] = {
            "score": model.score,
            "generate": partial(_generate, model, tokenizer),
            "wait": time.sleep,
            **(handlers or {}),
        }

    def __enter__(self) -> "CommandBroadcaster":
        return self

    def __exit__(self, exception: type[BaseException] | None, *details: object) -> None:
        if exception is None or not issubclass(exception, KeyboardInterrupt):
            broadcast_object(self._world_group, [_END, []])

    def run(self, command: str, *arguments: Any) -> Any:
        """Execute a command on all ranks; return the result of rank 0."""
        broadcast_object(self._world_group, [command, arguments])
        return self._handlers[command](*arguments)

    def run_worker_loop(self) -> None:
        """Execute rank 0's commands on another rank until its context exits."""
        while (call := broadcast_object(self._world_group, None))[0] != _END:
            command, arguments = call
            self._handlers[command](*arguments)

    def score(self, requests: Sequence[ScoreRequest], unit: str) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and True if it is the greedy one.

        `unit` is the unit of the progress bar.
        """

        def score_batch(indices: list[int]) -> Any:
            return self.run("score", [requests[i] for i in indices])

        keys = [["score", *request] for request in requests]
        scores = self._run_in_batches(requests, unit, score_batch, keys)
        return [(log_prob, is_greedy) for log_prob, is_greedy in scores]

    def generate(
        self,
        contexts: Sequence[list[int]],
        stop_sequences: Sequence[str],
        options: dict[str, Any],
    ) -> list[list[int]]:
        """Return the generated token ids of each context of token ids.

        The options are `max_new_tokens`, `temperature`, `top_p` and `seed`.
        """

        def generate_batch(indices: list[int]) -> Any:
            prompts, ids = [contexts[i] for i in indices], {"sample_ids": indices}
            return self.run("generate", prompts, stop_sequences, options | ids)

        is_random = options["temperature"] > 0  # samples depend on the index of the context
        keys = [
            ["generate", context, [*stop_sequences], options, i if is_random else None]
            for i, context in enumerate(contexts)
        ]
        return self._run_in_batches(contexts, "texts", generate_batch, keys)

    def wait(self, seconds: float) -> None:
        """Sleep on all ranks, so that no broadcast waits longer than its timeout."""
        self.run("wait", seconds)

    def _run_in_batches(
        self,
        requests: Sequence[Any],
        unit: str,
        run_batch: Callable[[list[int]], Any],
        keys: Sequence[Any],
    ) -> list[Any]:
        """Return the results in the order of the requests, from the cache if it has them.

        Batches are sorted, so that their requests share prefixes. `keys` are those of the cache.
        """
        results: list[Any] = [None] * len(requests)
        batch_size = _REQUESTS_PER_BATCH
        if self.cache is not None:
            results, batch_size = self.cache.load(keys), _REQUESTS_PER_CACHED_BATCH
        missing = [i for i, result in enumerate(results) if result is None]
        order = sorted(missing, key=lambda i: requests[i])
        with tqdm(total=len(order), unit=f" {unit}", disable=None, leave=False) as bar:
            for start in range(0, len(order), batch_size):
                indices = order[start : start + batch_size]
                batch = run_batch(indices)
                for i, result in zip(indices, batch, strict=True):
                    results[i] = result
                if self.cache is not None:
                    self.cache.save([keys[i] for i in indices], batch)
                bar.update(len(indices))
        return results


def _generate(
    model: InferenceModel,
    tokenizer: PromptTokenizer,
    prompts: Sequence[list[int]],
    stop_sequences: Sequence[str],
    options: dict[str, Any],
) -> list[list[int]]:
    is_finished = build_stop_check(tokenizer, stop_sequences)
    return model.generate(prompts, is_finished=is_finished, **options)
