"""Test that held-out sequences represent all held-out documents."""

import itertools

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data.data_source import open_data_sources
from hlat.data.heldout_sequences import pack_heldout_sequences
from hlat.data.packed_sequences import compute_loss_mask
from hlat.data.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(eos) -> Tokenizer:
    return Tokenizer("embedded", ".", eos)


def test_sequences_contain_the_packed_documents(corpora, tokenizer: Tokenizer) -> None:
    source = open_data_sources(corpora.data(heldout_documents=10), 1)["beta"]
    texts = list(source.read_heldout_documents())
    heldout = pack_heldout_sequences(source, tokenizer, 10**6, 32, corpora.data())
    packed = np.concatenate(tokenizer.encode(texts))
    assert heldout.sequences.tokens.dtype == np.int32
    assert heldout.sequences.tokens.shape == (len(packed) // 32, 32)
    np.testing.assert_array_equal(
        heldout.sequences.tokens.ravel(), packed[: heldout.sequences.tokens.size]
    )
    # The first token of each sequence is not predicted, hence the tolerance
    spelled = b"".join(text.encode() for text in texts)
    assert heldout.tokens_per_byte == pytest.approx(len(packed) / len(spelled), rel=0.05)


def test_tokens_per_byte_counts_the_bytes_of_predicted_tokens(
    corpora, tokenizer: Tokenizer
) -> None:
    source = open_data_sources(corpora.data(heldout_documents=10), 1)["beta"]
    heldout = pack_heldout_sequences(source, tokenizer, 3, 32, corpora.data())
    # A byte-level token has one character per byte
    num_bytes = sum(
        len(tokenizer._backend_tokenizer.id_to_token(token))
        for token in heldout.sequences.tokens[:, 1:].ravel().tolist()
        if token != tokenizer.eos_token_id
    )
    assert heldout.tokens_per_byte == pytest.approx(
        3 * 31 / num_bytes, rel=0.1
    )  # rows are short and split characters


def test_fewer_sequences_cover_all_documents_evenly(corpora, tokenizer: Tokenizer) -> None:
    source = open_data_sources(corpora.data(heldout_documents=10), 1)["beta"]
    every = pack_heldout_sequences(source, tokenizer, 10**6, 32, corpora.data())
    some = pack_heldout_sequences(source, tokenizer, 5, 32, corpora.data())
    rows = [
        np.flatnonzero((every.sequences.tokens == row).all(axis=1))[0]
        for row in some.sequences.tokens
    ]
    assert len(rows) == 5
    assert np.ptp(np.diff(rows)) <= 1
    assert rows[-1] >= len(every.sequences.tokens) * 4 // 5 - 1


@pytest.mark.parametrize("count", [0, 3])
def test_too_little_text_is_an_error(corpora, tokenizer: Tokenizer, count: int) -> None:
    source = open_data_sources(corpora.data(heldout_documents=count), 1)["gamma"]
    with pytest.raises(ConfigError) as error:
        pack_heldout_sequences(source, tokenizer, 1, 10_000, corpora.data())
    assert str(error.value).startswith(
        f"data.heldout_documents={count}: those of data.sources.gamma hold "
    )
    assert "less than one sequence of 10000; hold out more" in str(error.value)


def test_loss_mask_excludes_tokens_and_bytes_of_first_tokens(corpora, tokenizer: Tokenizer) -> None:
    data = corpora.data(heldout_documents=10, loss_mask=True)
    source = open_data_sources(data, 1)["alpha"]
    heldout = pack_heldout_sequences(source, tokenizer, 10**6, 32, data)
    rows = heldout.sequences.tokens.tolist()
    counted = [b for row in rows for a, b in itertools.pairwise(row) if a != tokenizer.eos_token_id]
    num_joints = len(rows) * 31 - len(counted)
    assert num_joints >= 5
    # A byte-level token has one character per byte
    spelled = [
        tokenizer._backend_tokenizer.id_to_token(token)
        for token in counted
        if token != tokenizer.eos_token_id
    ]
    exact = len(counted) / sum(map(len, spelled))
    # Short rows split characters, hence the tolerance
    assert heldout.tokens_per_byte == pytest.approx(exact, rel=0.05)


def test_bits_per_byte_of_a_constant_loss_are_independent_of_the_mask(
    corpora, tokenizer: Tokenizer
) -> None:
    """Compute 1 bit per byte from a loss of one bit per byte and zero for EOS.

    Excluding first tokens from the loss but not from the bytes would reduce the result.
    """
    corpora.write(
        "alpha", [f"{word} five six seven" for word in ["one", "two", "three", "four"] * 9]
    )
    for loss_mask in (False, True):
        data = corpora.data(heldout_documents=10, loss_mask=loss_mask)
        source = open_data_sources(data, 1)["alpha"]
        heldout = pack_heldout_sequences(source, tokenizer, 10**6, 16, data)
        counted = compute_loss_mask(heldout.sequences, loss_mask)
        bits = [
            0
            if token == tokenizer.eos_token_id
            else len(tokenizer._backend_tokenizer.id_to_token(token))
            for token in heldout.sequences.tokens[counted].tolist()
        ]
        assert np.mean(bits) * heldout.tokens_per_byte == pytest.approx(1.0, abs=1e-12)


def test_held_out_documents_without_predicted_tokens_are_an_error(
    corpora, tokenizer: Tokenizer
) -> None:
    corpora.write("alpha", ["a"] * 40)
    data = corpora.data(heldout_documents=10, loss_mask=True)
    with pytest.raises(
        ConfigError, match=r"leave the loss no text .* or set data\.loss_mask=false"
    ):
        pack_heldout_sequences(open_data_sources(data, 1)["alpha"], tokenizer, 1, 8, data)


@pytest.mark.parametrize("is_bos_eos", [False, True])
@pytest.mark.parametrize("loss_mask", [False, True])
def test_bos_is_excluded_from_bytes_and_masked_targets(
    corpora, bos_tokenizer_file, eos, bos, loss_mask: bool, is_bos_eos: bool
) -> None:
    """Compute 1 bit per byte from a loss of one bit per byte and zero for BOS and EOS."""
    bos_token = eos if is_bos_eos else bos
    tokenizer = Tokenizer(str(bos_tokenizer_file), ".", eos, bos_token=bos_token)
    corpora.write("alpha", [f"{word} five six seven" for word in ("one", "two", "three") * 12])
    data = corpora.data(heldout_documents=10, loss_mask=loss_mask, bos_token=bos_token)
    source = open_data_sources(data, 1)["alpha"]
    heldout = pack_heldout_sequences(source, tokenizer, 10**6, 16, data)
    tokens = heldout.sequences.tokens
    packed = np.concatenate(tokenizer.encode(list(source.read_heldout_documents())))
    np.testing.assert_array_equal(tokens.ravel(), packed[: tokens.size])
    assert packed[0] == tokenizer.bos_token_id

    counted = compute_loss_mask(heldout.sequences, loss_mask)
    is_eos, is_bos = tokens == tokenizer.eos_token_id, tokens == tokenizer.bos_token_id
    is_start = np.zeros_like(is_bos)
    is_start[:, 1:] = is_bos[:, 1:] & is_eos[:, :-1]
    assert is_start.sum() >= 5
    assert counted[is_start].any() != loss_mask
    bits = [
        len(tokenizer._backend_tokenizer.id_to_token(token))
        if token not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
        else 0
        for token in tokens[counted].tolist()
    ]
    assert np.mean(bits) * heldout.tokens_per_byte == pytest.approx(1.0, abs=1e-12)
