"""Held-out text is encoded once, and again after its file is damaged."""

import numpy as np
import pytest

from hlat.config.data import DataConfig
from hlat.data import heldout_sequences
from hlat.data.heldout_sequences import pack_heldout_sequences
from hlat.data.tokenizer import EMBEDDED, EMBEDDED_EOS_TOKEN, Tokenizer


class Source:
    """Held-out documents in several scripts, one of them empty."""

    name, num_heldout_documents = "texts", 4

    def read_heldout_documents(self) -> list[str]:
        return ["one document " * 20, "日本語の文書です。" * 9, "", "Ещё один документ. " * 9]


@pytest.fixture
def tokenizer(tmp_path, monkeypatch) -> Tokenizer:
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return Tokenizer(EMBEDDED, ".", EMBEDDED_EOS_TOKEN)


def pack(tokenizer: Tokenizer) -> heldout_sequences.HeldoutSequences:
    return pack_heldout_sequences(Source(), tokenizer, 8, 32, DataConfig(sources={}))


def assert_equal(first, second) -> None:
    for name in ("documents", "num_bytes", "is_target", "document_hashes"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert np.array_equal(first.sequences.tokens, second.sequences.tokens)
    assert first.digest == second.digest


def test_text_is_encoded_once(tokenizer, monkeypatch) -> None:
    encoded = pack(tokenizer)
    monkeypatch.setattr(heldout_sequences, "_encode_documents", None)  # raises if it is called
    assert_equal(pack(tokenizer), encoded)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_damaged_file_is_replaced(tokenizer, tmp_path, keep: int) -> None:
    encoded = pack(tokenizer)
    (file,) = (tmp_path / "cache" / "heldout").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # in the data of an array, whose checksum differs then
    file.write_bytes(content[:keep] if keep >= 0 else content)
    assert_equal(pack(tokenizer), encoded)
    assert heldout_sequences.load_arrays(file) is not None


def test_text_is_encoded_without_a_writable_directory(tokenizer, tmp_path, monkeypatch) -> None:
    encoded = pack(tokenizer)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    assert_equal(pack(tokenizer), encoded)


def test_key_depends_on_documents_and_tokenizer() -> None:
    paths = {
        heldout_sequences.compute_cache_path(documents, key)
        for documents in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""])
        for key in ("one", "another")
    }
    assert len(paths) == 8
