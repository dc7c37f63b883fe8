"""Test that the fast encoder gives the ids of the reference."""

import sys

import numpy as np
import pytest
import tokenizers

from hlat.config.config_errors import ConfigError
from hlat.data import encoder_test_texts, token_encoders
from hlat.data.token_encoders import FastEncoder, FastEncoderWithFallback, ReferenceEncoder
from hlat.data.tokenizer import EMBEDDED_FILE

TEXTS = [
    "",
    "\x00",
    "\r\n",
    " \r\n\t \n",
    "def main():\n\treturn 1  # été\r\n",
    "木 😀 e\u0301 " * 100,
    "a" * 100_000,
]


@pytest.fixture(scope="module")
def content() -> bytes:
    return EMBEDDED_FILE.read_bytes()


@pytest.fixture(scope="module")
def reference(content) -> ReferenceEncoder:
    rust = tokenizers.Tokenizer.from_buffer(content)
    rust.encode_special_tokens = True
    return ReferenceEncoder(rust)


class Recorder:
    """An encoder that records its inputs."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts):
        self.texts += texts
        return [self.encode_one(text) for text in texts]

    def encode_one(self, text):
        return np.zeros(len(text), np.int32)


def test_both_give_the_same_ids(content, reference) -> None:
    texts = [
        *TEXTS,
        *(text for text in encoder_test_texts.generate_texts(10) if "\u088f" not in text),
    ]
    ids = FastEncoder("embedded", content).encode(texts)
    assert [found.dtype for found in ids] == [np.int32] * len(texts)
    assert [found.tolist() for found in ids] == [
        found.tolist() for found in reference.encode(texts)
    ]


def test_text_may_be_given_as_bytes(content) -> None:
    fast = FastEncoder("embedded", content)
    assert fast.encode_one("été".encode()).tolist() == fast.encode_one("été").tolist()


def test_control_tokens_are_text_to_both(content, reference, eos) -> None:
    text = f"a{eos} {eos}{eos}b"
    (fast,), (slow,) = FastEncoder("embedded", content).encode([text]), reference.encode([text])
    assert 0 not in slow
    assert fast.tolist() == slow.tolist()


def test_the_fast_library_is_loaded_anew_before_it_remembers_too_much(
    content, reference, monkeypatch
) -> None:
    monkeypatch.setattr(token_encoders, "TOKENS_PER_RELOAD", 50)
    fast = FastEncoder("embedded", content)
    libraries = set()
    for text in ["few words"] * 3 + ["many words " * 50, "few words"]:
        libraries.add(id(fast._library))
        assert fast.encode_one(text).tolist() == reference.encode([text])[0].tolist()
    assert len(libraries) == 2


def test_listed_code_points_go_to_the_reference_and_no_others() -> None:
    """Test every UTF-8 length, and ranges across two lengths."""
    ranges = [(0xE9, 0xEB), (0x7FE, 0x801), (0x88F, 0x88F), (0xFFFE, 0x10001), (0x2B73A, 0x2B7FF)]
    listed = {point for first, last in ranges for point in range(first, last + 1)}
    near = {point + step for point in listed for step in (-0x40, -1, 0, 1, 0x40, 0x1000)}
    reference = Recorder()
    exact = FastEncoderWithFallback(Recorder(), reference, ranges)
    exact.encode([f"a{chr(point)}b" for point in sorted(near)])
    assert {ord(text[1]) for text in reference.texts} == listed
    assert exact.encode(["plain", "été"[:1] + "木"])[0].size == 5


def test_without_listed_code_points_the_reference_is_idle() -> None:
    reference = Recorder()
    FastEncoderWithFallback(Recorder(), reference, ()).encode(TEXTS)
    assert reference.texts == []


def test_a_missing_library_is_an_error_that_says_what_to_install(content, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(ConfigError) as error:
        FastEncoder("embedded", content)
    assert "pip install 'hlat[fast]', or set data.encoder=reference" in str(error.value)


def test_an_unknown_kind_of_tokenizer_is_an_error_that_names_it() -> None:
    content = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0})).to_str().encode()
    with pytest.raises(ConfigError) as error:
        FastEncoder("word.json", content)
    assert "does not know a tokenizer like data.tokenizer=word.json" in str(error.value)
    assert 'Unsupported model type "WordPiece"' in str(error.value)
