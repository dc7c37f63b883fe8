"""Trees of common beginnings: every text and question is in them once."""

import numpy as np
import pytest

from hlat.evaluation.prefixes import LEAST_SHARED, Question, Text, grow


def _walk(branches, before=()):
    """Every branch with all that stands before it."""
    for branch in branches:
        assert branch.begin == len(before)
        whole = (*before, *branch.tokens)
        yield whole, branch
        yield from _walk(branch.branches, whole)


@pytest.mark.parametrize("num_ids", [2, 3, 50])
def test_every_text_is_read_and_every_question_asked_once(num_ids):
    generator = np.random.default_rng(num_ids)
    stems = [tuple(generator.integers(0, num_ids, n).tolist()) for n in (3, 16, 40, 41)]
    made = {
        stem[: generator.integers(1, len(stem) + 1)]
        + tuple(generator.integers(0, num_ids, generator.integers(0, 30)).tolist())
        for stem in stems
        for _ in range(60)
    }
    made |= {stems[3] + stems[2], stems[3] + stems[2][:20] + stems[1]}
    texts = [
        Text(tokens, [Question(i, place, 0) for place in range(len(tokens))])
        for i, tokens in enumerate(sorted(made))
    ]
    walked = list(_walk(grow(texts)))
    questions = [question for _, branch in walked for question in branch.questions]
    assert len(questions) == len(set(questions)) == sum(len(text.tokens) for text in texts)
    for whole, branch in walked:
        for question in branch.questions:
            assert branch.begin <= question.place < len(whole)
            text = texts[question.request].tokens
            assert whole[: question.place + 1] == text[: question.place + 1]


def test_what_many_share_stands_once_and_what_is_short_is_repeated():
    shared, short = tuple(range(30)), tuple(range(100, 100 + LEAST_SHARED - 1))
    texts = [Text((*shared, i, *short, j)) for i in (1, 2) for j in (5, 6, 7)]
    (stem,) = grow(texts)
    assert stem.tokens == shared
    assert [branch.tokens for branch in stem.branches] == [(1, *short), (2, *short)]
    assert [leaf.tokens for leaf in stem.branches[0].branches] == [(5,), (6,), (7,)]
    apart = grow([Text((*short, 1)), Text((*short, 2))])
    assert [branch.tokens for branch in apart] == [(*short, 1), (*short, 2)]
