"""Prefix tree of token sequences, so that each shared prefix is computed once.

The sequences of a task share contexts: the choices of a question, and the questions after the same
few-shot examples. One pass over the sorted sequences finds the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_SHARED_TOKENS = 16
"""Minimum length of a shared prefix, since its KV cache must be copied."""


@dataclass(frozen=True)
class TokenQuery:
    """Request for the log-probability of a token; `position` is that of the token before it."""

    request: int
    position: int
    token: int


@dataclass(frozen=True)
class ScoredSequence:
    """Sequence of token ids with its queries in any order."""

    tokens: tuple[int, ...]
    queries: list[TokenQuery] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixNode:
    """Tokens that sequences share after those of the parent node.

    Attributes:
        start: Position of the first token.
        tokens: Token ids, at least one.
        queries: Queries at the positions of the node.
        children: Continuations, where sequences differ.
    """

    start: int
    tokens: tuple[int, ...]
    queries: list[TokenQuery]
    children: "list[PrefixNode]"


def build_prefix_tree(sequences: Sequence[ScoredSequence], start: int = 0) -> list[PrefixNode]:
    """Return the nodes of sorted unique sequences that share their first `start` tokens."""
    nodes, first = [], 0
    while first < len(sequences):
        last, end = first, len(sequences[first].tokens)
        while last + 1 < len(sequences):
            common = _count_common_prefix(sequences[last].tokens, sequences[last + 1].tokens)
            if common - start < MIN_SHARED_TOKENS:
                break
            last, end = last + 1, min(end, common)
        group = sequences[first : last + 1]
        queries = [q for sequence in group for q in sequence.queries if start <= q.position < end]
        children = build_prefix_tree([s for s in group if len(s.tokens) > end], end)
        nodes.append(PrefixNode(start, group[0].tokens[start:end], queries, children))
        first = last + 1
    return nodes


def _count_common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)
