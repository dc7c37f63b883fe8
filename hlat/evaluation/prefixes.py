"""What texts have in common, so that the model reads it once.

A task asks about thousands of texts: the endings of a question, the questions behind the same few
examples. Sorted, texts that begin alike are neighbours, and a tree of their common beginnings is
found in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST_SHARED = 16
"""Tokens that are worth a branch: what was kept of them is copied, which is not free either."""


@dataclass(frozen=True)
class Question:
    """A token whose probability is asked for.

    Attributes:
        request: Whose question it is.
        place: Behind which token of the text, counted from the text's first.
        token: Its id.
    """

    request: int
    place: int
    token: int


@dataclass(frozen=True)
class Text:
    """A text that is to be read, and what is asked about it.

    Attributes:
        tokens: Its ids.
        questions: In any order.
    """

    tokens: tuple[int, ...]
    questions: list[Question] = field(default_factory=list)


@dataclass(frozen=True)
class Branch:
    """Tokens that some texts share behind those of the branch below.

    Attributes:
        begin: How many come before them.
        tokens: At least one.
        questions: Those whose place is among them.
        branches: How the texts go on, where they differ.
    """

    begin: int
    tokens: tuple[int, ...]
    questions: list[Question]
    branches: "list[Branch]"


def grow(texts: Sequence[Text], begin: int = 0) -> list[Branch]:
    """The branches of some texts, which are sorted, differ and share their first `begin` tokens."""
    branches, first = [], 0
    while first < len(texts):
        last, end = first, len(texts[first].tokens)
        while last + 1 < len(texts):
            common = _num_common(texts[last].tokens, texts[last + 1].tokens)
            if common - begin < LEAST_SHARED:
                break
            last, end = last + 1, min(end, common)
        branches.append(_branch(texts[first : last + 1], begin, end))
        first = last + 1
    return branches


def _branch(texts: Sequence[Text], begin: int, end: int) -> Branch:
    questions = [q for text in texts for q in text.questions if begin <= q.place < end]
    longer = [text for text in texts if len(text.tokens) > end]
    return Branch(begin, texts[0].tokens[begin:end], questions, grow(longer, end))


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
