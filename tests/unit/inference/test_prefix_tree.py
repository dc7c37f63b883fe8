"""Prefix trees: every token and query occurs once."""

import numpy as np
import pytest

from hlat.inference.inference_model import (
    MIN_SHARED_TOKENS,
    ScoredSequence,
    TokenQuery,
    build_prefix_tree,
)


def _walk(nodes, prefix=()):
    """Yield every node with its tokens after those of its parents."""
    for node in nodes:
        assert node.start == len(prefix)
        tokens = (*prefix, *node.tokens)
        yield tokens, node
        yield from _walk(node.children, tokens)


@pytest.mark.parametrize("num_ids", [2, 3, 50])
def test_tree_covers_all_tokens_and_queries_once(num_ids):
    generator = np.random.default_rng(num_ids)
    stems = [tuple(generator.integers(0, num_ids, n).tolist()) for n in (3, 16, 40, 41)]
    unique = {
        stem[: generator.integers(1, len(stem) + 1)]
        + tuple(generator.integers(0, num_ids, generator.integers(0, 30)).tolist())
        for stem in stems
        for _ in range(60)
    }
    unique |= {stems[3] + stems[2], stems[3] + stems[2][:20] + stems[1]}
    sequences = [
        ScoredSequence(tokens, [TokenQuery(i, position, 0) for position in range(len(tokens))])
        for i, tokens in enumerate(sorted(unique))
    ]
    nodes = list(_walk(build_prefix_tree(sequences)))
    queries = [query for _, node in nodes for query in node.queries]
    assert len(queries) == len(set(queries)) == sum(len(sequence.tokens) for sequence in sequences)
    for tokens, node in nodes:
        for query in node.queries:
            assert node.start <= query.position < len(tokens)
            expected = sequences[query.request].tokens
            assert tokens[: query.position + 1] == expected[: query.position + 1]


def test_short_prefixes_are_repeated():
    shared, short = tuple(range(30)), tuple(range(100, 100 + MIN_SHARED_TOKENS - 1))
    sequences = [ScoredSequence((*shared, i, *short, j)) for i in (1, 2) for j in (5, 6, 7)]
    (root,) = build_prefix_tree(sequences)
    assert root.tokens == shared
    assert [node.tokens for node in root.children] == [(1, *short), (2, *short)]
    assert [leaf.tokens for leaf in root.children[0].children] == [(5,), (6,), (7,)]
    separate = build_prefix_tree([ScoredSequence((*short, 1)), ScoredSequence((*short, 2))])
    assert [node.tokens for node in separate] == [(*short, 1), (*short, 2)]
