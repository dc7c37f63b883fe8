"""Test that the source bytes of the tokens of a text sum to the bytes of the text."""

from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from hlat.data import source_bytes
from hlat.data.document_chunks import DocumentChunker, build_document_chunker
from hlat.data.source_bytes import SourceByteEncoder
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**parts: object) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_FILE))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Build a BPE model with the normalizer of Llama 2."""
    vocabulary = ["<unk>", *BYTE_TOKENS, "▁", "a", "b", "▁a", "aa", "木"]
    model = models.BPE(
        {token: i for i, token in enumerate(vocabulary)},
        [("▁", "a"), ("a", "a")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def unigram(byte_fallback: bool) -> tokenizers.Tokenizer:
    pieces = ["<unk>", *BYTE_TOKENS, "▁", "a", "b", "▁a", "kg", "k", "木"]
    scored = [(piece, -5.0 if piece in BYTE_TOKENS else -1.0) for piece in pieces]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scored, 0, byte_fallback))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    vocabulary = ["[UNK]", "a", "b", "##a", "##b", "e", "##e", "k", "##g", "木", "5", "."]
    model = models.WordPiece({x: i for i, x in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_tokens([AddedToken("<b>", lstrip=True, rstrip=True), AddedToken("aa")])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte level, trimmed": lambda: byte_level(post_processor=processors.ByteLevel()),
    "byte level, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte level, lower case": lambda: byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
    ),
    "byte fallback": byte_fallback,
    "unigram": lambda: unigram(byte_fallback=False),
    "unigram, byte fallback": lambda: unigram(byte_fallback=True),
    "word piece": word_piece,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def encoder(request: pytest.FixtureRequest) -> SourceByteEncoder:
    tokenizer = TOKENIZERS[request.param]()
    return SourceByteEncoder(tokenizer, build_document_chunker(tokenizer), "x")


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[tuple[str, int]]:
    ids, num_bytes = SourceByteEncoder(tokenizer, DocumentChunker(), "x").encode(text)
    return [*zip(map(tokenizer.id_to_token, ids.tolist()), num_bytes.tolist(), strict=True)]


_CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("ab  .5\0\n\u200dé\u0301\ufb01㎏木日👩🇩\u1112\u1161\u11ab한\ufeff\xa0"),
)


@given(st.text(_CHARACTERS, max_size=24))
@example("👩‍👩‍👧‍👦🇩🇪")
@example("e\u0301\u0327 \u1112\u1161\u11ab ㎏ ﬁ")
@example("\0\0")
@example("  <b>  aa \0")
@example("")
def test_source_bytes_sum_to_those_of_the_text(encoder: SourceByteEncoder, text: str) -> None:
    ids, num_bytes = encoder.encode(text)
    expected = encoder._tokenizer.encode(text, add_special_tokens=False).ids
    assert ids.tolist() == expected
    assert num_bytes.size == ids.size
    assert (num_bytes >= 0).all()
    assert num_bytes.sum() == (len(text.encode()) if expected else 0)


def test_byte_level_tokens_have_the_bytes_that_they_spell() -> None:
    text = "日本語 📚 été \u0301 naïve 👩‍👩‍👧"
    tokenizer = byte_level()
    spelled = [len(token) for token, _ in encode(tokenizer, text)]  # a character per byte
    assert [num_bytes for _, num_bytes in encode(tokenizer, text)] == spelled


def test_bytes_of_divided_characters_and_dropped_text() -> None:
    fallback = [("▁", 0), ("<0xE6>", 1), ("<0x97>", 1), ("<0xA5>", 1), ("▁a", 2)]
    assert encode(byte_fallback(), "日 a") == fallback
    run = [("▁", 0), ("<0xE6>", 1), ("<0x97>", 1), ("<0xA5>", 1)]
    assert encode(unigram(byte_fallback=True), "日日")[:4] == run
    trimmed = byte_level(post_processor=processors.ByteLevel())
    assert encode(trimmed, " a") == [("Ġa", 2)]
    assert encode(word_piece(), " a  b\0 ") == [("a", 2), ("b", 5)]
    assert encode(word_piece(), "㎏ é .") == [("[UNK]", 3), ("e", 3), (".", 2)]


def test_a_character_of_tokens_that_spell_no_bytes_belongs_to_the_last() -> None:
    model = models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("k", -1.0), ("g", -1.0)], 0, False)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.NFKC()
    assert encode(tokenizer, "㎏") == [("k", 0), ("g", 3)]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_chunks_of_a_document_have_the_same_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "a aa b 木 aa a  日 a\n" * 40
    whole = encode(tokenizer, text)
    monkeypatch.setattr(source_bytes, "_CHUNK_BYTES", 32)
    chunker = build_document_chunker(tokenizer)
    ids, num_bytes = SourceByteEncoder(tokenizer, chunker, "x").encode(text)
    tokens = map(tokenizer.id_to_token, ids.tolist())
    assert [*zip(tokens, num_bytes.tolist(), strict=True)] == whole
    assert chunker.split_before_spaces


def test_delimiters_have_no_bytes(bos_tokenizer_file, eos: str, bos: str) -> None:
    tokenizer = Tokenizer(str(bos_tokenizer_file), ".", eos, bos_token=bos)
    ids, num_bytes = tokenizer.encode_with_bytes("日 x")
    np.testing.assert_array_equal(ids, tokenizer.encode(["日 x"])[0])
    assert (num_bytes[0], num_bytes[1:-1].sum(), num_bytes[-1]) == (0, 5, 0)
    assert tokenizer.encode_with_bytes("")[1].size == 0
