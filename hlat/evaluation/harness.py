"""EleutherAI's lm-evaluation-harness: its tasks, its prompts and its metrics, our answers.

The library is used as it is. Between it and the model stands an adapter that turns its requests
into token ids exactly as its own adapter for transformers does, so that scores are the same.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from hlat.evaluation.leader import Leader, Request

_MOST_NEW_TOKENS = 256
"""Where a task does not say, as the harness's own adapters have it."""


class Adapter(TemplateLM):  # type: ignore[misc]
    """What the harness asks, answered by a model of ours.

    Args:
        leader: Asks all ranks.
        positions: Tokens of the longest text that the model reads.
    """

    def __init__(self, leader: Leader, positions: int) -> None:
        super().__init__()
        self._leader, self._prompts, self.max_length = leader, leader.prompts, positions
        self.shortened = 0
        """Requests of which the beginning was left out, since the model reads no more."""

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a document."""
        return self._prompts.eos

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that stands for an empty context."""
        return self._prompts.prefix

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text, which begins a prompt unless it is said not to."""
        return self._prompts.encode(string, begins=add_special_tokens is not False)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The likelihood of whole texts, in windows of the harness's own cut."""
        windows: list[Request] = []
        owners = []
        for owner, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, cut):
                windows.append(window)
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._score(windows, "texts"), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model goes on with, cut before the first text at which it is to end."""
        written = [""] * len(requests)
        for like, own in _alike([request.args[1] for request in requests]):
            found = self._generate([requests[i].args[0] for i in own], like)
            for i, text in zip(own, found, strict=True):
                written[i] = text
        return written

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._score([(context, answer) for _, context, answer in requests], "answers")

    def _score(self, requests: Sequence[Request], what: str) -> list[tuple[float, bool]]:
        asked = [self._fitted(context, answer) for context, answer in requests]
        with _progress(what, len(asked)) as progress:
            return self._leader.score(asked, progress)

    def _fitted(self, context: list[int], answer: list[int]) -> Request:
        """As much of the end of a context as there are positions for, one of them at least."""
        room = max(1, self.max_length + 1 - len(answer))
        self.shortened += len(context) > room
        return context[-room:], answer

    def _generate(self, texts: Sequence[str], asked: dict[str, Any]) -> list[str]:
        options = normalize_gen_kwargs(asked, _MOST_NEW_TOKENS)
        until = handle_stop_sequences(options.get("until"), eos=self._prompts.eos_text)
        # The harness's adapter refuses a model that reads fewer tokens than a task may write
        most = options["max_gen_toks"]
        most = most if most < self.max_length else self.max_length // 2
        prompts = []
        for text in texts:
            ids = self.tok_encode(text)
            self.shortened += len(ids) > self.max_length - most
            prompts.append(ids[-(self.max_length - most) :])
        chosen = {
            "max_new_tokens": most,
            "temperature": options["temperature"] if options.get("do_sample") else 0.0,
            "top_p": options.get("top_p", 1.0),
            "seed": DEFAULT_OTHER_SEED,
        }
        ends = [end for end in until if end]
        with _progress("texts", len(prompts)) as progress:
            written = self._leader.generate(prompts, ends, chosen, progress)
        return [self._cut(ids, ends) for ids in written]

    def _cut(self, ids: list[int], ends: Sequence[str]) -> str:
        end = ids.index(self._prompts.eos) if self._prompts.eos in ids else len(ids)
        text = self._prompts.decode(ids[:end])
        for until in ends:
            text = text.split(until)[0]
        return text


def measure(adapter: Adapter, tasks: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Run loaded tasks, and return what the harness says of them.

    Args:
        adapter: Who answers.
        tasks: What `hlat.evaluation.library.load` returned.
        limit: Questions of each task; None: all.
    """
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found: dict[str, Any] = evaluator.evaluate(adapter, tasks, limit=limit, log_samples=False)
    return found


def _alike(options: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Options that are the same, and whose they are."""
    groups: dict[str, list[int]] = {}
    for i, each in enumerate(options):
        groups.setdefault(repr(each), []).append(i)
    for own in groups.values():
        yield options[own[0]], own


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing in a log."""
    with tqdm(total=total, unit=f" {what}", disable=None, leave=False) as bar:

        def more(count: int) -> None:
            bar.update(count)

        yield more
