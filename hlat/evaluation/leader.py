"""One rank asks, all ranks answer.

The model may lie on many ranks, and each of its answers needs all of them; but tasks, their data
and the library that knows them belong on one. It tells the others what to do, and they do nothing
else until it says that all is done. What it tells is plain data.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hlat.data.prompts import Prompts
from hlat.evaluation.text_model import TextModel
from hlat.parallelism.group import Group, tell

Request = tuple[list[int], list[int]]
"""Token ids of a context and of what is to follow it."""
_AT_ONCE = 2048
"""Requests of which the ranks are told together."""


class Leader:
    """The rank that asks; a context, whose end is that of the others too.

    A signal that ends it has reached the others as well, which then hear nothing any more.

    Args:
        model: What answers, on all ranks.
        prompts: Its tokenizer.
        everyone: All ranks.
    """

    def __init__(self, model: TextModel, prompts: Prompts, everyone: Group) -> None:
        self._model, self.prompts, self._everyone = model, prompts, everyone

    def __enter__(self) -> "Leader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self.order("end")

    def score(
        self, requests: Sequence[Request], progress: Callable[[int], None] = lambda _: None
    ) -> list[tuple[float, bool]]:
        """How likely continuations are, and whether the model itself would write them.

        Those that begin alike are asked together: what they share is read once.

        Args:
            requests: Contexts and continuations.
            progress: Hears of every further requests that were answered.
        """
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i])
        for some in _portions(order):
            asked = [requests[i] for i in some]
            tell(self._everyone, {"do": "score", "requests": asked})
            for i, answer in zip(some, self._model.score(asked), strict=True):
                answers[i] = answer
            progress(len(some))
        return answers

    def generate(
        self,
        texts: Sequence[list[int]],
        until: Sequence[str],
        options: dict[str, Any],
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Let the model go on with texts.

        Args:
            texts: Token ids.
            until: Texts at the first of which each ends, which the end of a document does too.
            options: `max_new_tokens`, `temperature`, `top_p` and `seed`.
            progress: Hears of every further texts that were written.
        """
        written: list[list[int]] = [[]] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: texts[i])
        for some in _portions(order):
            prompts = [texts[i] for i in some]
            details = {"numbers": some, "prompts": prompts, "until": [*until], "options": options}
            tell(self._everyone, {"do": "generate", **details})
            found = _generate(self._model, self.prompts, some, prompts, until, options)
            for i, ids in zip(some, found, strict=True):
                written[i] = ids
            progress(len(some))
        return written

    def wait(self, seconds: float) -> None:
        """Do nothing for a while, and let the others know that it is meant."""
        tell(self._everyone, {"do": "wait"})
        time.sleep(seconds)

    def order(self, what: str, **details: Any) -> None:
        """Tell the others to do something that the caller knows of."""
        tell(self._everyone, {"do": what, **details})


def follow(
    model: TextModel, prompts: Prompts, everyone: Group, known: dict[str, Callable[..., Any]]
) -> None:
    """Do as the leader says until it says that all is done.

    Args:
        model: What answers, on all ranks.
        prompts: Its tokenizer.
        everyone: All ranks.
        known: What else it may say: whom to call with the details.
    """
    while (order := tell(everyone, None))["do"] != "end":
        what = order.pop("do")
        if what == "score":
            model.score(order["requests"])
        elif what == "generate":
            _generate(model, prompts, **order)
        elif what != "wait":
            known[what](**order)


def _generate(
    model: TextModel,
    prompts_: Prompts,
    numbers: Sequence[int],
    prompts: Sequence[list[int]],
    until: Sequence[str],
    options: dict[str, Any],
) -> list[list[int]]:
    ends = _Ends(prompts_, until)
    return model.generate(prompts, finished=ends.reached, numbers=numbers, **options)


class _Ends:
    """When a text ends."""

    def __init__(self, prompts: Prompts, until: Sequence[str]) -> None:
        self._prompts, self._until = prompts, until
        # A token is a byte of text at least; some more begin a character that is cut
        self._tail = max((len(text.encode()) for text in until), default=0) + 4

    def reached(self, ids: list[int]) -> bool:
        """Whether the last of some tokens ends the document, or one of the texts."""
        if ids[-1] == self._prompts.eos:
            return True
        text = self._prompts.decode(ids[-self._tail :])
        return any(end in text for end in self._until)


def _portions(order: list[int]) -> list[list[int]]:
    return [order[begin : begin + _AT_ONCE] for begin in range(0, len(order), _AT_ONCE)]
