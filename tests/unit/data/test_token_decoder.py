"""Texts of tokens, of which each is one byte of a character."""

import pytest

from hlat.data.token_decoder import TokenDecoder, decode_continuation
from tests.support.byte_tokenizers import ByteFallbackTokenizer, ByteTokenizer

UNICODE_TEXTS = ["aé木b", "日本語の文章", "😀👩\u200d👩\u200d👧🏽é", "¿\ufffd?木"]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), ByteFallbackTokenizer()])
@pytest.mark.parametrize("text", UNICODE_TEXTS)
def test_texts_of_tokens_equal_the_text(tokenizer, text: str) -> None:
    decoder = TokenDecoder(tokenizer)
    assert "".join([decoder.append(token) for token in text.encode()] + [decoder.flush()]) == text


def test_an_invalid_byte_leaves_the_characters_around_it() -> None:
    decoder = TokenDecoder(ByteFallbackTokenizer())
    parts = [decoder.append(token) for token in [*"é".encode(), 0xE6, *b"ab"]]
    assert "".join(parts) == "é\ufffdab"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), ByteFallbackTokenizer()])
def test_a_continuation_leaves_the_prompt_unchanged(tokenizer) -> None:
    """An incomplete character after the prompt is no reason to replace those of the prompt."""
    prompt = list("été 木".encode())
    assert decode_continuation(tokenizer, prompt, list("語b".encode())) == "語b"
    assert decode_continuation(tokenizer, prompt, [0xE6]) == "\ufffd"
    assert decode_continuation(tokenizer, prompt, []) == ""
