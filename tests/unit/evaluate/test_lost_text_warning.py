"""Warnings of text that the tokenizer of a model loses."""

import json
from pathlib import Path

import pytest

from hlat.data.prompt_tokenizer import load_run_tokenizer
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE, Tokenizer
from hlat.evaluate import heldout_task


@pytest.fixture
def lowercase_file(tmp_path: Path) -> Path:
    """Write the embedded tokenizer with a normalizer."""
    settings = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8"))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings | {"normalizer": {"type": "Lowercase"}}))
    return path


def test_warn_of_heldout_text_that_is_lost(lowercase_file: Path, capsys) -> None:
    tokenizer = Tokenizer(str(lowercase_file), ".", EMBEDDED_EOS_TOKEN)
    heldout_task._warn_of_lost_text(tokenizer, "prose", iter(["all lower case"]))
    assert not capsys.readouterr().err
    heldout_task._warn_of_lost_text(tokenizer, "prose", iter(["One", "two"]))
    assert capsys.readouterr().err == (
        "WARNING: the tokenizer loses 16.67% (1 of 6 bytes; for example 'O' becomes 'o') of the "
        "held-out text of prose\n"
    )


def test_measure_the_lost_part_of_a_prompt(lowercase_file: Path) -> None:
    tokenizer = load_run_tokenizer(lowercase_file, EMBEDDED_EOS_TOKEN)
    assert tokenizer.measure_lost_text("a Bee").share == 0.2
