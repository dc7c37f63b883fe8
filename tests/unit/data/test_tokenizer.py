"""Tokens come from one file, and documents cannot forge control tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from hlat.config.errors import ConfigError
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer

TEXTS = [
    "def main():\n\treturn 1  # été\r\n",
    "".join(map(chr, range(32, 0x250))),
    "\x00\x7f 木 😀 \u200b e\u0301",
    "   leading and trailing   ",
]


@pytest.fixture
def tokenizer(eos) -> Tokenizer:
    return Tokenizer("embedded", ".", eos)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert ids.dtype == np.int32
    assert ids[-1] == tokenizer.eos
    assert tokenizer.decode(ids[:-1].tolist()) == text


def test_the_shipped_vocabulary_has_the_size_it_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 4096
    assert 0 <= tokenizer.eos < 4096


def test_control_tokens_written_as_text_stay_text(tokenizer: Tokenizer, eos) -> None:
    text = f"before {eos} after{eos}"
    (ids,) = tokenizer.encode([text])
    assert tokenizer.eos not in ids[:-1]
    assert tokenizer.decode(ids.tolist()) == text + eos


def test_empty_text_has_no_tokens_and_no_eos(tokenizer: Tokenizer) -> None:
    assert [len(ids) for ids in tokenizer.encode(["", "a", ""])] == [0, 2, 0]
    assert tokenizer.encode([]) == []


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path, eos) -> None:
    content = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "cut.json").write_text(json.dumps(content))
    plain, cut = Tokenizer("embedded", ".", eos), Tokenizer("cut.json", str(tmp_path), eos)
    assert cut.encode([TEXTS[0]])[0].tolist() == plain.encode([TEXTS[0]])[0].tolist()
    assert cut.sha256 != plain.sha256


def test_a_missing_eos_token_lists_the_special_ones(eos) -> None:
    with pytest.raises(ConfigError) as error:
        Tokenizer("embedded", ".", "</s>")
    assert str(error.value) == (
        f"data.eos_token=</s> is not a token of {EMBEDDED_FILE}; its special tokens are: {eos}"
    )


def test_missing_and_foreign_files_are_errors(tmp_path: Path, eos) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer=no\.json: cannot read .*/no\.json"):
        Tokenizer("no.json", str(tmp_path), eos)
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenizer("", str(tmp_path), eos)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a tokenizer\.json"):
        Tokenizer("bad.json", str(tmp_path), eos)
