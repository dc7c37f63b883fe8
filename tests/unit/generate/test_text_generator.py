"""Text that grows token by token, up to a stop string or an end token."""

import pytest

from hlat.generate.text_generator import TextStream

END = 0


class ByteTokenizer:
    """Tokenizer with bytes as ids; id 0 is a special token."""

    end_token_ids = frozenset({END})

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")


def stream(text: str, *stop: str, prompt: str = "ab") -> list[str]:
    """Return the parts of a text of which each byte is a token, and the rest."""
    one = TextStream(ByteTokenizer(), list(prompt.encode()), stop)
    ids: list[int] = []
    parts = []
    for byte in text.encode():
        ids.append(byte)
        parts.append(one.append(ids))
        if one.is_finished:
            return parts
    return [*parts, one.flush()]


def test_tokens_are_printed_immediately() -> None:
    assert stream("xyz") == ["x", "y", "z", ""]


def test_characters_are_printed_when_complete() -> None:
    assert stream("aé木") == ["a", "", "é", "", "", "木", ""]


def test_incomplete_bytes_at_the_end_are_replacement_characters() -> None:
    one = TextStream(ByteTokenizer(), [97])
    assert one.append([0xC3]) == ""
    assert one.flush() == "\ufffd"


@pytest.mark.parametrize("prompt", ["", "a", "é" * 9])
def test_the_prompt_is_not_part_of_the_text(prompt: str) -> None:
    assert "".join(stream("xyz", prompt=prompt)) == "xyz"


def test_stop_strings_over_several_tokens_are_not_printed() -> None:
    assert stream("one\n\ntwo", "\n\n") == ["o", "n", "e", "", ""]
    assert "".join(stream("abcabd!", "abd", "zz")) == "abc"


def test_partial_stop_strings_are_printed() -> None:
    assert stream("a\nb\n", "\n\n") == ["a", "", "\nb", "", "\n"]


def test_first_of_several_stop_strings_ends_the_text() -> None:
    one = TextStream(ByteTokenizer(), [97], ("d", "bcd"))
    assert one.append(list(b"abcde")) == "a"
    assert one.is_finished


def test_end_token_is_not_part_of_the_text() -> None:
    one = TextStream(ByteTokenizer(), [97], ("xx",))
    assert one.append([120]) == ""
    assert one.append([120, END]) == "x"
    assert (one.text, one.is_finished) == ("x", True)
