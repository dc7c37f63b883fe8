"""What tasks ask of a model: how likely given texts are, and how a text goes on.

An answer does not depend on what else is asked, nor on batches and layout but for the last bits:
texts are sorted and batched here, each token is read once, and what is drawn follows from the seed,
the text's number and the position alone.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.engine.interface import Engine, Texts, World
from hlat.evaluation.prefixes import Branch, Question, Text, grow
from hlat.parallelism.group import tell

TOKENS_AT_ONCE = 8192
"""Tokens whose keys and values are kept at a time, where a single text does not have more."""

_ROOT = np.zeros(1, np.int64)


class TextModel:
    """An engine that reads and writes texts of token ids.

    All ranks of the run call each method with the same arguments, and get the same answer.
    Data-parallel ranks divide the texts.
    """

    def __init__(self, engine: Engine, tokens_at_once: int = TOKENS_AT_ONCE) -> None:
        """Use an engine that was built.

        Args:
            engine: Its model's weights are read whenever something is asked.
            tokens_at_once: Bounds the memory that a batch takes.
        """
        self._engine, self._tokens_at_once = engine, tokens_at_once

    @property
    def world(self) -> World:
        """This process's place among those that call."""
        return self._engine.world

    def score(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """How likely continuations are.

        Args:
            requests: Token ids of a context, at least one, and of what is to follow it.

        Returns:
            The logarithm of the continuation's probability, and whether it is what the model itself
            would write, taking the likeliest token each time.
        """
        texts = _share(_texts(requests), self._engine.world.dp_rank, self._engine.world.dp_size)
        found = _Answers(len(requests))
        if texts:
            self._read(self._engine.texts(), [(0, branch) for branch in grow(texts)], found)
        asked = sorted({question.request for text in texts for question in text.questions})
        own = [[i, float(found.totals[i]), bool(found.likeliest[i])] for i in asked]
        answers = [(0.0, True)] * len(requests)
        for i, total, likeliest in self._joined(own):
            answers[i] = (total, likeliest)
        return answers

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        finished: Callable[[list[int]], bool],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Let the model go on with prompts.

        Args:
            prompts: Token ids, at least one each; equal ones are read once.
            max_new_tokens: Where every text ends.
            finished: Whether a text, of which it is given the new tokens, ends here.
            temperature: Logits are divided by it; 0: the likeliest token each time.
            top_p: Only of the likeliest tokens, as few as hold this share of the probability.
            seed: Of what is drawn.
            numbers: With the seed decides what is drawn for each prompt, its number among all by
                default.

        Returns:
            The new tokens of each, with that at which it was finished.
        """
        world = self._engine.world
        numbers = range(len(prompts)) if numbers is None else numbers
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), *prompts[i]))
        sizes = {i: len(prompts[i]) + max_new_tokens for i in order}
        own = []
        for batch in _batches(order[world.dp_rank :: world.dp_size], sizes, self._tokens_at_once):
            chances = [_chances(seed, numbers[i], max_new_tokens) for i in batch]
            writing = _Writing(len(batch), np.stack(chances), finished, temperature, top_p)
            writing.run(self._engine, [tuple(prompts[i]) for i in batch])
            own += [[i, tokens] for i, tokens in zip(batch, writing.tokens, strict=True)]
        written = dict(self._joined(own))
        return [written[i] for i in range(len(prompts))]

    def _read(self, below: Texts, branches: list[tuple[int, Branch]], answers: "_Answers") -> None:
        """Read branches, each behind a text, and then those that they branch into."""
        sizes = {i: len(branch.tokens) + branch.begin for i, (_, branch) in enumerate(branches)}
        order = sorted(sizes, key=lambda i: len(branches[i][1].tokens))
        for batch in _batches(order, sizes, self._tokens_at_once):
            some = [branches[i] for i in batch]
            tokens, counts = _padded([branch.tokens for _, branch in some])
            # What has nothing in front and nothing behind is read without keeping anything
            alone = all(branch.begin == 0 and not branch.branches for _, branch in some)
            room = 0 if alone else tokens.shape[1]
            texts = below.select(np.array([row for row, _ in some]), room)
            texts.extend(tokens, counts)
            answers.add(texts, [branch for _, branch in some])
            further = [
                (i, next_) for i, (_, branch) in enumerate(some) for next_ in branch.branches
            ]
            if further:
                self._read(texts, further, answers)

    def _joined(self, own: list[Any]) -> list[Any]:
        """What the replicas have found, on all ranks."""
        world = self._engine.world
        speaks = world.peers is None or world.peers.leads
        every = world.everyone.collect(own if speaks else [])
        return [item for items in tell(world.everyone, every) for item in items]


class _Answers:
    """What is known of each request so far."""

    def __init__(self, num_requests: int) -> None:
        self.totals = np.zeros(num_requests)
        self.likeliest = np.ones(num_requests, np.bool)

    def add(self, texts: Texts, branches: list[Branch]) -> None:
        """Add up what is asked about tokens that were just read."""
        asked: list[tuple[int, int, Question]] = [
            (row, question.place - branch.begin, question)
            for row, branch in enumerate(branches)
            for question in branch.questions
        ]
        if not asked:
            return
        rows, places = (np.array([each[i] for each in asked], np.int64) for i in range(2))
        tokens = np.array([question.token for _, _, question in asked], np.int64)
        log_probs, likeliest = texts.log_probs(rows, places, tokens)
        requests = np.array([question.request for _, _, question in asked])
        np.add.at(self.totals, requests, log_probs)
        np.logical_and.at(self.likeliest, requests, likeliest == tokens)


class _Writing:
    """A batch of texts that the model writes."""

    def __init__(
        self,
        num_texts: int,
        chances: NDArray[np.int64],
        finished: Callable[[list[int]], bool],
        temperature: float,
        top_p: float,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_texts)]
        """What was written of each."""
        self._chances, self._finished = chances, finished
        self._temperature, self._top_p = temperature, top_p
        self._going = np.arange(num_texts)

    def run(self, engine: Engine, prompts: list[tuple[int, ...]]) -> None:
        """Write until all are finished, or as long as there are chances."""
        different = sorted(set(prompts))
        tokens, counts = _padded(different)
        texts = engine.texts().select(_ROOT.repeat(len(different)), tokens.shape[1])
        texts.extend(tokens, counts)
        rows = np.array([different.index(prompt) for prompt in prompts])
        length = self._chances.shape[1]
        drawn = self._draw(texts, rows, 0)
        held = np.arange(len(prompts))
        texts = texts.select(rows, length)
        for position in range(1, length):
            if not len(self._going):
                return
            if 2 * len(self._going) <= len(held):  # the others are read on for nothing
                texts = texts.select(np.searchsorted(held, self._going), length - position)
                held = self._going
            kept = np.zeros((len(held), 1), np.int32)
            kept[np.searchsorted(held, self._going), 0] = drawn
            texts.extend(kept, np.ones(len(held), np.int64))
            drawn = self._draw(texts, np.searchsorted(held, self._going), position)

    def _draw(self, texts: Texts, rows: NDArray[np.int64], position: int) -> NDArray[np.int32]:
        """Write the next token of each text that goes on; returns those of which do so still."""
        chances = self._chances[self._going, position]
        drawn = texts.draw(rows, chances, self._temperature, self._top_p)
        goes_on = []
        for text, token in zip(self._going.tolist(), drawn.tolist(), strict=True):
            self.tokens[text].append(token)
            goes_on.append(not self._finished(self.tokens[text]))
        self._going = self._going[goes_on]
        return drawn[goes_on]


def _texts(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Text]:
    """What must be read to answer requests, sorted.

    Raises:
        ValueError: Nothing comes before a continuation.
    """
    found: dict[tuple[int, ...], Text] = {}
    for request, (context, continuation) in enumerate(requests):
        if not len(context):
            raise ValueError(
                f"request {request} has no context, and the first token of a text has no "
                "probability; give the token that ends documents"
            )
        if not len(continuation):
            continue
        tokens = (*context, *continuation[:-1])
        first = len(context) - 1
        found.setdefault(tokens, Text(tokens)).questions.extend(
            Question(request, first + i, token) for i, token in enumerate(continuation)
        )
    return [found[tokens] for tokens in sorted(found)]


def _share(texts: list[Text], rank: int, size: int) -> list[Text]:
    """Consecutive texts, which begin alike, with about as many tokens as the other shares have."""
    ends = np.cumsum([len(text.tokens) for text in texts])
    if size == 1 or not texts:
        return texts
    begin, end = np.searchsorted(ends, [ends[-1] * rank / size, ends[-1] * (rank + 1) / size])
    return texts[begin : len(texts) if rank == size - 1 else end]


def _batches(order: Sequence[int], sizes: dict[int, int], most: int) -> Iterator[list[int]]:
    """Cut an order into batches whose number times their largest size does not exceed `most`."""
    batch: list[int] = []
    largest = 0
    for i in order:
        largest = max(largest, sizes[i])
        if batch and (len(batch) + 1) * largest > most:
            yield batch
            batch, largest = [], sizes[i]
        batch.append(i)
    if batch:
        yield batch


def _padded(texts: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids as [n, s], filled up with zeros, and how many each has."""
    counts = np.array([len(text) for text in texts], np.int64)
    tokens = np.zeros((len(texts), counts.max()), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return tokens, counts


def _chances(seed: int, number: int, count: int) -> NDArray[np.int64]:
    """What decides the draws of a text, position by position."""
    key = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.integers(0, 1 << 32, count, np.int64)
