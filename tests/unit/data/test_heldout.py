"""Held-out sequences and bytes come from all held-out documents."""

import numpy as np
import pytest

from hlat.config.errors import ConfigError
from hlat.data.heldout import pack_heldout
from hlat.data.source import open_sources
from hlat.data.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(eos) -> Tokenizer:
    return Tokenizer("embedded", ".", eos)


def test_all_sequences_are_the_packed_documents(corpora, tokenizer: Tokenizer) -> None:
    source = open_sources(corpora.data(heldout_documents=10), 1)["beta"]
    texts = list(source.heldout_texts())
    heldout = pack_heldout(source, tokenizer, 10**6, 32)
    packed = np.concatenate(tokenizer.encode(texts))
    assert heldout.tokens.dtype == np.int32
    assert heldout.tokens.shape == (len(packed) // 32, 32)
    np.testing.assert_array_equal(heldout.tokens.ravel(), packed[: heldout.tokens.size])
    # All but the first token of each sequence is predicted; a token stands for some bytes of text
    spelled = b"".join(text.encode() for text in texts)
    assert heldout.tokens_per_byte == pytest.approx(len(packed) / len(spelled), rel=0.05)


def test_tokens_per_byte_counts_the_bytes_of_exactly_the_predicted_tokens(
    corpora, tokenizer: Tokenizer
) -> None:
    source = open_sources(corpora.data(heldout_documents=10), 1)["beta"]
    heldout = pack_heldout(source, tokenizer, 3, 32)
    # A byte-level token is spelled with one character for each of its bytes
    num_bytes = sum(
        len(tokenizer._rust.id_to_token(token))
        for token in heldout.tokens[:, 1:].ravel().tolist()
        if token != tokenizer.eos
    )
    assert heldout.tokens_per_byte == pytest.approx(
        3 * 31 / num_bytes, rel=0.1
    )  # characters cut at the edges of short rows


def test_fewer_sequences_are_spread_over_all_documents(corpora, tokenizer: Tokenizer) -> None:
    source = open_sources(corpora.data(heldout_documents=10), 1)["beta"]
    every = pack_heldout(source, tokenizer, 10**6, 32)
    some = pack_heldout(source, tokenizer, 5, 32)
    rows = [np.flatnonzero((every.tokens == row).all(axis=1))[0] for row in some.tokens]
    assert len(rows) == 5
    assert np.ptp(np.diff(rows)) <= 1
    assert rows[-1] >= len(every.tokens) * 4 // 5 - 1


@pytest.mark.parametrize("count", [0, 3])
def test_too_little_text_is_an_error(corpora, tokenizer: Tokenizer, count: int) -> None:
    source = open_sources(corpora.data(heldout_documents=count), 1)["gamma"]
    with pytest.raises(ConfigError) as error:
        pack_heldout(source, tokenizer, 1, 10_000)
    assert str(error.value).startswith(
        f"data.heldout_documents={count}: those of data.sources.gamma hold "
    )
    assert "less than one sequence of 10000; hold out more" in str(error.value)
