"""Text that grows token by token, up to a stop string or an end token."""

import pytest

from hlat.inference.text_stream import TextStream
from tests.support.byte_tokenizers import END, SPECIAL, ByteFallbackTokenizer, ByteTokenizer

UNICODE_TEXTS = ["aé木b", "日本語の文章", "😀👩\u200d👩\u200d👧🏽é"]


def stream(text: str, *stop: str, prompt: str = "ab") -> list[str]:
    """Return the parts of a text of which each byte is a token, and the rest."""
    one = TextStream(ByteTokenizer(), list(prompt.encode()), stop)
    parts = []
    for byte in text.encode():
        parts.append(one.append(byte))
        if one.is_finished:
            return parts
    return [*parts, one.flush()]


def test_tokens_are_printed_immediately() -> None:
    assert stream("xyz") == ["x", "y", "z", ""]


def test_characters_are_printed_when_complete() -> None:
    assert stream("aé木") == ["a", "", "é", "", "", "木", ""]


def test_incomplete_bytes_at_the_end_are_replacement_characters() -> None:
    one = TextStream(ByteTokenizer(), [97])
    assert one.append(0xC3) == ""
    assert one.flush() == "\ufffd"


@pytest.mark.parametrize("prompt", ["", "a", "é" * 9])
def test_the_prompt_is_not_part_of_the_text(prompt: str) -> None:
    assert "".join(stream("xyz", prompt=prompt)) == "xyz"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), ByteFallbackTokenizer()])
@pytest.mark.parametrize("text", UNICODE_TEXTS)
def test_parts_equal_the_text_if_the_prompt_ends_in_a_character(tokenizer, text: str) -> None:
    """The text begins with the character that it completes."""
    ids = list(text.encode())
    for length in range(1, len(ids)):
        one = TextStream(tokenizer, ids[:length])
        parts = [one.append(token) for token in ids[length:]] + [one.flush()]
        complete = bytes(ids[:length]).decode(errors="ignore")
        assert "".join(parts) == one.text == text[len(complete) :]


def test_stop_strings_over_several_tokens_are_not_printed() -> None:
    assert stream("one\n\ntwo", "\n\n") == ["o", "n", "e", "", ""]
    assert "".join(stream("abcabd!", "abd", "zz")) == "abc"
    assert "".join(stream("a木😀b", "木😀")) == "a"


def test_partial_stop_strings_are_printed() -> None:
    assert stream("a\nb\n", "\n\n") == ["a", "", "\nb", "", "\n"]


def test_first_of_several_stop_strings_ends_the_text() -> None:
    one = TextStream(ByteTokenizer(), [97], ("d", "bcd"))
    assert [one.append(token) for token in b"abcd"] == ["a", "", "", ""]
    assert (one.text, one.is_finished) == ("a", True)


@pytest.mark.parametrize(("end", "stop"), [(END, "xx"), (SPECIAL, "<|special|>")])
def test_end_token_is_not_part_of_the_text(end: int, stop: str) -> None:
    one = TextStream(ByteTokenizer(), [97], (stop,))
    assert one.append(120) + one.append(end) == "x"
    assert (one.text, one.is_finished) == ("x", True)
