"""Training of a tokenizer on files and prepared directories, and the printed overrides."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hlat.data.tokenizer import Tokenizer
from hlat.prepare import __main__ as prepare
from hlat.prepare import tokenizer_training as command
from hlat.prepare.text_sample import TextSample
from tests.support.document_commands import REPOSITORY, find_config_problems

TEXT = "def add(first, second):\n    return first + second  # the sum, été 木 😀\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.py").write_text(f"# {number}\n{TEXT * (number + 1)}")

    def run_command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = command.main(("train", *arguments))
        except SystemExit as exited:
            code = int(exited.code or 0)
        return (code, *capsys.readouterr())

    return run_command


def test_tokenizer_is_lossless(run, tmp_path: Path, compose) -> None:
    (tmp_path / "texts/page.txt").write_text("a text<|endoftext|> with the name of a special token")
    code, out, _ = run("texts", "vocab_size=300", "bos_token=<|begin|>")
    assert code == 0
    directory = tmp_path / "tokenizers/texts-300"
    trained = Tokenizer("tokenizer.json", str(directory), "<|endoftext|>", bos_token="<|begin|>")
    assert trained.vocab_size == 300
    (ids,) = trained.encode([f"\x00 {TEXT}<|endoftext|>"])
    assert trained.decode(ids[1:-1].tolist()) == f"\x00 {TEXT}<|endoftext|>"
    assert (ids[0], ids[-1]) == (trained.bos_token_id, trained.eos_token_id)
    assert (ids[1:-1] != trained.eos_token_id).all()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"]) == ("<|endoftext|>", "<|begin|>")
    loaded = AutoTokenizer.from_pretrained(directory)
    assert loaded.decode(loaded(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    *_, lost, line = out.splitlines()
    assert lost.startswith("text that the tokenizer loses: 0.00% (0 of ")
    assert line.startswith(f"use it: hlat train data.tokenizer={directory}/tokenizer.json ")
    assert "model.vocab_size=300" in line
    assert not find_config_problems(line.removeprefix("use it: "), compose)
    code, _, errors = run("texts", "vocab_size=300")
    assert code == 2
    assert "tokenizers/texts-300 exists already" in errors


def test_training_is_deterministic(run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("texts", "--vocab-size", "280", f"output={name}")[0] == 0
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (
        tmp_path / "b/tokenizer.json"
    ).read_bytes()


def test_heldout_documents_are_not_read(run, tmp_path: Path, monkeypatch, capsys, compose) -> None:
    assert prepare.main(["texts", "heldout=0.3", "output=mine"]) == 0
    capsys.readouterr()
    opened = []
    build = TextSample.__init__

    def record(self, files, *arguments: object) -> None:
        opened.extend(file.location for file in files)
        build(self, files, *arguments)

    monkeypatch.setattr(TextSample, "__init__", record)
    code, out, _ = run("mine", "vocab_size=290", "sample=20KB")
    assert code == 0
    assert opened == [f"{tmp_path}/mine/train/part-00000.arrow"]
    line = out.splitlines()[-1].removeprefix("use it: ")
    assert f"data.sources.files.paths=[{tmp_path}/mine/train]" in line
    assert f"data.sources.files.heldout_paths=[{tmp_path}/mine/heldout]" in line
    assert not find_config_problems(line, compose)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["texts"], "the following arguments are required: vocab_size="),
        (["texts", "vocab_size=256"], "vocab_size=256 is less than 256 bytes and 1 special"),
        (["nowhere", "vocab_size=300"], "nowhere: there is no such file or directory"),
        (["texts", "vocab_size=300", "sample=5"], "5 is not a size such as 5GB"),
    ],
)
def test_invalid_arguments_are_one_message(run, arguments: list[str], message: str) -> None:
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors


def test_lost_text_is_an_error_with_the_names_of_files(run, tmp_path: Path) -> None:
    (tmp_path / "texts/latin.txt").write_bytes(b"caf\xe9")
    code, _, errors = run("texts", "vocab_size=300")
    assert code == 2
    assert "1 file without a readable document" in errors
    assert f"{tmp_path}/texts/latin.txt" in errors
    assert "hlat prepare skip_damaged=true max_lost=" in errors


def test_incomplete_vocabulary_is_reported(run) -> None:
    code, out, _ = run("texts", "vocab_size=5000")
    assert code == 0
    assert "no more pairs to merge" in out
    assert "model.vocab_size=5000" not in out


@pytest.mark.slow  # trains
def test_default_model_trains_with_the_tokenizer(run, tmp_path: Path) -> None:
    assert prepare.main(["texts"]) == 0
    _, out, _ = run("data/texts", "vocab_size=300")
    small = ["model.num_layers=1", "run.steps=2", "run.name=x", "batch.global_batch_size=4"]
    arguments = shlex.split(out.splitlines()[-1].removeprefix("use it: "))
    done = subprocess.run(
        [sys.executable, "-m", *arguments, *small],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
