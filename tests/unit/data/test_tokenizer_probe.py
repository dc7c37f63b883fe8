"""Test that a tokenizer.json that panics, hangs or has no tokens is rejected with its name."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.config.config_errors import ConfigError
from hlat.data import tokenizer_probe
from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.data.token_encoders import ReferenceEncoder
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer, parse_tokenizer

VOCABULARY = {"a": 0, "b": 1, "<|endoftext|>": 2}
BPE = {"type": "BPE", "vocab": VOCABULARY, "merges": []}
WORD_LEVEL = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"}
WORD_PIECE = {
    "type": "WordPiece",
    "vocab": VOCABULARY,
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}
UNIGRAM = {
    "type": "Unigram",
    "vocab": [[token, -1.0] for token in VOCABULARY],
    "unk_id": None,
    "byte_fallback": False,
}


def charsmap(content: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(content).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded}}


def split(pattern: str) -> dict[str, Any]:
    settings = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Split", **settings}}


def replace(pattern: dict[str, str]) -> dict[str, Any]:
    return {"normalizer": {"type": "Replace", "pattern": pattern, "content": "b"}}


FAILING = "cannot encode and decode a text that starts with "
UNREADABLE = "is not a tokenizer.json that the tokenizers library"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "WordLevel": ({"model": WORD_LEVEL}, FAILING),
    "WordPiece": ({"model": WORD_PIECE}, FAILING),
    "Unigram": ({"model": UNIGRAM}, FAILING),
    "empty vocabulary": (
        {"model": {**BPE, "vocab": {}}, "added_tokens": []},
        "has an empty vocabulary",
    ),
    "huge token id": (
        {"model": {**BPE, "vocab": {**VOCABULARY, "c": 2**31}}},
        "has the token id 2147483648; ids must be smaller than 16777216",
    ),
    "empty charsmap": (charsmap(b""), UNREADABLE),
    "short charsmap": (charsmap(b"\1\0"), UNREADABLE),
    "charsmap with another length": (charsmap(b"\xff\xff\0\0abcd"), UNREADABLE),
    "charsmap without an end": (charsmap(b"\4\0\0\0\xff\xff\xff\xff"), FAILING),
    "empty Replace": (replace({"String": ""}), FAILING),
    "empty Replace with a regular expression": (replace({"Regex": "a*"}), FAILING),
    "FixedLength 0": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, FAILING),
    "exponential regular expression": (split("(x+x+)+y"), FAILING),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a byte-level tokenizer with changes."""

    def write_(**changes: object) -> Path:
        content = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8")) | changes
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(content))
        return path

    return write_


@pytest.mark.parametrize("case", CASES)
def test_refuse_tokenizers_that_fail(case: str, write: Callable[..., Path], eos) -> None:
    changes, reason = CASES[case]
    path = write(**changes)
    with pytest.raises(ConfigError) as error:
        Tokenizer(str(path), ".", eos)
    assert str(error.value).startswith(f"data.tokenizer={path}: {path} {reason}")
    assert str(error.value).endswith("; use another tokenizer.json")


@pytest.mark.parametrize(
    ("limit", "value", "changes", "reason"),
    [
        ("CPU_SECONDS", 1, split("a*a*[^a][^a]"), "takes more than 1 s of computation"),
        ("MEMORY_BYTES", 1 << 20, {}, "ends the process that loads it, within 1,048,576 bytes"),
        ("TIMEOUT_S", 0.001, {}, "is not loaded, or does not encode some short texts, within"),
    ],
)
def test_limit_time_and_memory(
    limit: str, value: float, changes: dict[str, Any], reason: str, write, monkeypatch
) -> None:
    monkeypatch.setattr(tokenizer_probe, limit, value)
    content = write(version="1.0", **changes).read_bytes()
    with pytest.raises(ConfigError, match=f"^x {reason}"):
        tokenizer_probe.validate_tokenizer("x", content)


def test_probe_a_tokenizer_once(write, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    content, calls = write(version="1.0").read_bytes(), []
    monkeypatch.setattr(tokenizer_probe, "_find_problem", calls.append)
    for _ in range(2):
        parse_tokenizer("x", content)
    parse_tokenizer("x", EMBEDDED_FILE.read_bytes())
    assert calls == [content]
    (tmp_path / "cache/tokenizers").chmod(0)  # an unwritable cache is ignored
    parse_tokenizer("x", write(added_tokens=[]).read_bytes())


@pytest.mark.parametrize("file_type", ["device", "pipe", "large", "directory"])
def test_refuse_files_that_cannot_be_a_tokenizer(file_type: str, tmp_path: Path, eos) -> None:
    path, reason = tmp_path / "tokenizer.json", "it is not a regular file"
    if file_type == "device":
        path = Path("/dev/zero")
    elif file_type == "pipe":
        os.mkfifo(path)
    elif file_type == "directory":
        path.mkdir()
        reason = "Is a directory"
    else:
        with path.open("wb") as file:
            file.truncate(7 << 30)
        reason = "it has 7,516,192,768 bytes, more than the limit of 134,217,728"
    with pytest.raises(ConfigError) as error:
        Tokenizer(str(path), ".", eos)
    assert f"data.tokenizer={path}: cannot read {path} ({reason})" in str(error.value)


def test_encoding_failure_is_an_error_with_the_tokenizer(tmp_path: Path, monkeypatch) -> None:
    """Use a string that the probe does not encode."""
    path = tmp_path / "tokenizer.json"
    settings = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    monkeypatch.setattr(tokenizer_probe, "_find_problem", lambda _: None)
    for changes in ({"model": WORD_LEVEL}, charsmap(b"\4\0\0\0\xff\xff\xff\xff")):
        path.write_text(json.dumps(settings | parts | {"model": BPE} | changes))
        reason = f"{path} cannot encode a text \\(.*\\); use another"
        with pytest.raises(ConfigError, match=reason):
            PromptTokenizer(path, "<|endoftext|>", None, None).encode("\u00c5 c")
        encoder = ReferenceEncoder(parse_tokenizer("x", path.read_bytes()), str(path))
        with pytest.raises(ConfigError, match=reason):
            encoder.encode(["\u00c5 c"])


def test_refuse_a_tokenizer_that_finds_no_token_in_the_documents(
    write, corpora, open_loader
) -> None:
    added = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8"))["added_tokens"]
    path = write(model={**BPE, "vocab": {"<|endoftext|>": 0, "ж": 1}}, added_tokens=added)
    with pytest.raises(ConfigError, match="no token") as error:
        open_loader(corpora.data(tokenizer=str(path), max_lost_text=1.0))
    assert str(error.value) == (
        f"data.tokenizer={path}: 16 sampled documents of data.sources.alpha have text and no "
        "token; use a tokenizer.json with the characters of the documents"
    )
