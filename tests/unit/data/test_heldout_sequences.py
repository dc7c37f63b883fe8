"""Test that held-out sequences contain each token once, with its document and source bytes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data.data_source import open_data_sources
from hlat.data.heldout_sequences import (
    HeldoutSequences,
    pack_documents,
    pack_heldout_sequences,
)
from hlat.data.tokenizer import Tokenizer

TEXTS = ["日本語のテキストです。", "a", "", "Zwei  Wörter 🙂", "x" * 50, "👩‍👩‍👧‍👦 end "]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("embedded", ".", "<|endoftext|>")


def pack(corpora, tokenizer: Tokenizer, texts, length=16, count=None, **data) -> HeldoutSequences:
    settings = tokenizer, count, length, corpora.data(**data), "heldout=x: its documents"
    return pack_documents(texts, *settings, "give more text")


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
def test_every_token_is_a_target_once_with_its_bytes(corpora, tokenizer, length: int) -> None:
    heldout = pack(corpora, tokenizer, TEXTS, length)
    tokens, is_target = heldout.sequences.tokens, heldout.is_target
    expected = np.concatenate(tokenizer.encode(TEXTS))
    np.testing.assert_array_equal(tokens[is_target], expected)
    assert tokens.dtype == np.int32
    assert tokens[0, 0] == tokenizer.eos_token_id
    np.testing.assert_array_equal(tokens[1:, 0], tokens[:-1, -1])
    sizes = [len(text.encode()) for text in TEXTS if text]
    assert heldout.target_bytes.tolist() == sizes
    assert heldout.target_tokens.tolist() == [len(x) for x in tokenizer.encode(TEXTS) if x.size]


def test_one_row_more_for_a_few_tokens_more(corpora, tokenizer: Tokenizer) -> None:
    def count(num_tokens: int) -> tuple[tuple[int, int], int]:
        text = "\x01" * num_tokens
        assert len(tokenizer.encode([text])[0]) == num_tokens + 1
        heldout = pack(corpora, tokenizer, [text], 64)
        return heldout.documents.shape, int(heldout.is_target.sum())

    assert [count(n) for n in (3, 60, 63, 128, 177)] == [
        ((1, 64), 4),
        ((1, 64), 61),
        ((2, 64), 64),
        ((3, 64), 129),
        ((3, 64), 178),
    ]


def test_padding_is_excluded(corpora, tokenizer: Tokenizer) -> None:
    heldout = pack(corpora, tokenizer, ["日"], 8)
    assert heldout.sequences.target_mask is not None
    assert heldout.sequences.target_mask.tolist() == [[True] * 5 + [False] * 3]
    assert heldout.is_target.tolist() == [[False] + [True] * 4 + [False] * 3]
    assert pack(corpora, tokenizer, ["日"], 5).sequences.target_mask is None


@pytest.mark.parametrize("length", [4, 9])
def test_loss_mask_excludes_first_tokens_and_their_bytes(corpora, tokenizer, length: int) -> None:
    heldout = pack(corpora, tokenizer, TEXTS, length, loss_mask=True)
    encoded = [ids for ids in tokenizer.encode(TEXTS) if ids.size]
    assert heldout.target_tokens.tolist() == [len(ids) - 1 for ids in encoded]
    # A byte-level token has one character per byte
    spelled = tokenizer._backend_tokenizer.id_to_token
    assert heldout.target_bytes.tolist() == [
        sum(len(spelled(token)) for token in ids[1:-1].tolist()) for ids in encoded
    ]


@pytest.mark.parametrize("is_bos_eos", [False, True])
@pytest.mark.parametrize("loss_mask", [False, True])
def test_bos_has_no_bytes_and_starts_the_first_sequence(
    corpora, bos_tokenizer_file, eos, bos, loss_mask: bool, is_bos_eos: bool
) -> None:
    bos_token = eos if is_bos_eos else bos
    tokenizer = Tokenizer(str(bos_tokenizer_file), ".", eos, bos_token=bos_token)
    heldout = pack(corpora, tokenizer, TEXTS, 8, loss_mask=loss_mask, bos_token=bos_token)
    encoded = np.concatenate(tokenizer.encode(TEXTS))
    assert heldout.sequences.tokens[0, 0] == encoded[0] == tokenizer.bos_token_id
    assert heldout.target_bytes.sum() == sum(len(text.encode()) for text in TEXTS)
    num_documents = sum(map(bool, TEXTS))
    assert heldout.is_target.sum() == len(encoded) - (num_documents if loss_mask else 1)


def test_each_document_contributes_before_any_contributes_twice(corpora, tokenizer) -> None:
    texts = ["long " * 2000, *(f"{word} " * 30 for word in ("one", "two", "three", "four"))]
    whole = pack(corpora, tokenizer, texts, 16)
    assert len(whole.documents) > 100
    few = pack(corpora, tokenizer, texts, 16, 5)
    assert sorted({*few.documents[:, 1].tolist()}) == [0, 1, 2, 3, 4]
    more = pack(corpora, tokenizer, texts, 16, 40)
    assert more.documents.shape == (40, 16)
    assert (more.documents[:, 1] == 0).sum() > 20  # the others are complete
    assert more.target_bytes[1:].tolist() == whole.target_bytes[1:].tolist()
    rows = {row.tobytes() for row in more.sequences.tokens}
    assert rows >= {row.tobytes() for row in few.sequences.tokens}
    loop = more.select_evenly(8)
    np.testing.assert_array_equal(loop.documents, more.documents[::5])
    assert loop.target_tokens.sum() == 8 * 15
    assert more.select_evenly(41) is more


def test_the_digest_identifies_the_counted_text(corpora, tokenizer, bos_tokenizer_file, eos):
    digest = pack(corpora, tokenizer, TEXTS, 16).digest
    other = Tokenizer(str(bos_tokenizer_file), ".", eos, bos_token=eos)
    assert pack(corpora, tokenizer, TEXTS, 9).digest == digest
    assert pack(corpora, other, TEXTS, 16, bos_token=eos).digest == digest
    assert pack(corpora, tokenizer, [*TEXTS[:-1], "👩‍👩‍👧‍👦 and "]).digest != digest
    assert pack(corpora, tokenizer, TEXTS, 16, 2).digest != digest
    assert pack(corpora, tokenizer, TEXTS, loss_mask=True).digest != digest


def test_sources_are_packed_in_the_order_of_their_split(corpora, tokenizer: Tokenizer) -> None:
    source = open_data_sources(corpora.data(heldout_documents=10), 1)["beta"]
    texts = list(source.read_heldout_documents())
    heldout = pack_heldout_sequences(source, tokenizer, 10**6, 32, corpora.data())
    expected = pack(corpora, tokenizer, texts, 32)
    np.testing.assert_array_equal(heldout.sequences.tokens, expected.sequences.tokens)
    assert heldout.target_bytes.tolist() == [len(text.encode()) for text in texts]


def test_documents_without_text_in_the_loss_are_an_error(corpora, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"its documents have no token; give more text"):
        pack(corpora, tokenizer, ["", ""])
    with pytest.raises(
        ConfigError, match=r"leave the loss no text .* or set data\.loss_mask=false"
    ):
        pack(corpora, tokenizer, ["a", "b"], loss_mask=True)
    assert pack(corpora, tokenizer, ["a"]).target_bytes.tolist() == [1]


@pytest.mark.parametrize("num_characters", [10, 10**6])
def test_large_held_out_files_are_encoded_in_part(
    corpora, tokenizer: Tokenizer, num_characters: int
) -> None:
    documents = (f"document {i}".ljust(num_characters, "x") for i in itertools.count())
    source = SimpleNamespace(
        name="a", num_heldout_documents=10**9, read_heldout_documents=lambda: documents
    )
    heldout = pack_heldout_sequences(source, tokenizer, 3, 16, corpora.data())
    assert heldout.documents.shape == (3, 16)
    # Text for 12 sequences, so that the selected ones are a sample
    assert 8 <= len(heldout.document_hashes) < 100
    assert len(np.unique(heldout.documents)) >= 3
