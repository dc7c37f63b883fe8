"""Test that the fast encoder returns the ids of the reference."""

import sys

import numpy as np
import pytest
import tokenizers

from hlat.config.config_errors import ConfigError
from hlat.data import token_encoders
from hlat.data.token_encoders import FastEncoder, ReferenceEncoder
from hlat.data.tokenizer import EMBEDDED_FILE
from tests.support import encoder_test_texts

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
    """Encoder that records its inputs."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts):
        self.texts += texts
        return [np.zeros(len(text), np.int32) for text in texts]


def test_encoders_return_the_same_ids(content, reference) -> None:
    texts = [*TEXTS, *encoder_test_texts.generate_texts(10)]
    ids = FastEncoder("embedded", content, reference).encode(texts)
    assert [found.dtype for found in ids] == [np.int32] * len(texts)
    assert [found.tolist() for found in ids] == [
        found.tolist() for found in reference.encode(texts)
    ]


def test_control_tokens_are_encoded_as_text(content, reference, eos) -> None:
    text = f"a{eos} {eos}{eos}b"
    (fast,) = FastEncoder("embedded", content, reference).encode([text])
    (slow,) = reference.encode([text])
    assert 0 not in slow
    assert fast.tolist() == slow.tolist()


def test_fast_encoder_is_reloaded_to_limit_its_cache(content, reference, monkeypatch) -> None:
    monkeypatch.setattr(token_encoders, "TOKENS_PER_RELOAD", 50)
    fast = FastEncoder("embedded", content, reference)
    libraries = set()
    for text in ["few words"] * 3 + ["many words " * 50, "few words"]:
        libraries.add(id(fast._library))
        assert fast.encode([text])[0].tolist() == reference.encode([text])[0].tolist()
    assert len(libraries) == 2


@pytest.mark.parametrize("code_point", [0x88F, 0x11935, 0x1145E, 0x1E2EC, 0xFFFF, 0xE0061])
def test_reference_encodes_code_points_that_may_differ(content, code_point) -> None:
    """Test a letter of Unicode 17, combining marks after Unicode 9, a non-character and a tag."""
    reference = Recorder()
    fast = FastEncoder("embedded", content, reference)
    text = f"a{chr(code_point)}b"
    assert fast.encode(["plain", text, "é"])[1].tolist() == [0, 0, 0]
    assert reference.texts == [text]


def test_ordinary_text_does_not_use_the_reference(content) -> None:
    reference = Recorder()
    words = (
        "木曜日 한국어 ไทย हिन्दी தமிழ் বাংলা ខ្មែរ שָׁלוֹם مُحَمَّد ЁЖ e\u0301 👩\u200d👧 👍🏽 1\ufe0f\u20e3"
    )
    FastEncoder("embedded", content, reference).encode([*TEXTS, *words.split(" ")])
    assert reference.texts == []


def test_missing_library_is_an_error_with_its_package(content, reference, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(ConfigError) as error:
        FastEncoder("embedded", content, reference)
    assert "pip install 'hlat[fast]', or set data.encoder=reference" in str(error.value)


def test_unsupported_tokenizer_is_an_error_with_its_name(reference) -> None:
    content = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0})).to_str().encode()
    with pytest.raises(ConfigError) as error:
        FastEncoder("word.json", content, reference)
    assert "does not know a tokenizer like data.tokenizer=word.json" in str(error.value)
    assert 'Unsupported model type "WordPiece"' in str(error.value)
