"""Generation settings and chat template of the initial model in an export."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.hugging_face.pretrained_files import PretrainedFiles, load_pretrained_files
from hlat.checkpoint.hugging_face.tokenizer_files import build_tokenizer_files
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE

transformers = pytest.importorskip("transformers")

SHA256 = hashlib.sha256(EMBEDDED_FILE.read_bytes()).hexdigest()
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "source"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(EMBEDDED_FILE.read_bytes())
    (folder / "generation_config.json").write_text('{"top_p": 0.9, "eos_token_id": 7}')
    tokenizer = {"chat_template": TEMPLATE, "bos_token": "<|bos|>", "model_max_length": 5}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_files_of_the_initial_model(source: Path) -> None:
    found = load_pretrained_files(str(source), None, SHA256)
    assert found.generation_config == {"top_p": 0.9, "eos_token_id": 7}
    assert found.tokenizer_config["chat_template"] == TEMPLATE
    assert found.documents == {"chat_template.jinja": TEMPLATE.encode()}
    assert not found.warning


def test_a_relative_directory_belongs_to_a_parent_of_the_run(source: Path) -> None:
    run = source.parent / "runs" / "x"
    assert load_pretrained_files("source", run, SHA256).documents
    assert load_pretrained_files("source", None, SHA256).warning


def test_random_initial_weights_have_no_files() -> None:
    assert load_pretrained_files(None, None, SHA256) == PretrainedFiles()


def test_missing_directory() -> None:
    assert load_pretrained_files("nowhere", None, SHA256).warning == (
        "model.init_from=nowhere does not exist; the export has no chat template and no generation "
        "settings of it"
    )


def test_another_tokenizer(source: Path) -> None:
    found = load_pretrained_files(str(source), None, "0" * 64)
    assert found == PretrainedFiles(
        warning=f"model.init_from={source} has another tokenizer.json than the run; the export has "
        "no chat template and no generation settings of it"
    )


def test_weights_only(tmp_path: Path) -> None:
    assert load_pretrained_files(str(tmp_path), None, SHA256) == PretrainedFiles()


def test_a_damaged_file(source: Path) -> None:
    (source / "generation_config.json").write_text("[")
    with pytest.raises(CorruptCheckpointError, match=r"^generation_config\.json is not JSON"):
        load_pretrained_files(str(source), None, SHA256)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, {"eos_token_id": 3, "pad_token_id": 3}),
        ({"eos_token_id": 3}, {"eos_token_id": 3, "pad_token_id": 3}),
        ({"eos_token_id": [7, 3]}, {"eos_token_id": [7, 3], "pad_token_id": 3}),
        ({"eos_token_id": 7, "pad_token_id": 0}, {"eos_token_id": [3, 7], "pad_token_id": 0}),
        (
            {"top_k": 5, "pad_token_id": None, "transformers_version": "4"},
            {"top_k": 5, "eos_token_id": 3, "pad_token_id": 3},
        ),
    ],
)
def test_generation_config(source: dict[str, Any], expected: dict[str, Any]) -> None:
    assert PretrainedFiles(source).build_generation_config(3) == expected


def test_the_bos_of_the_run_replaces_that_of_the_initial_model(source: Path) -> None:
    files = PretrainedFiles({"bos_token_id": 1, "eos_token_id": 3})
    assert files.build_generation_config(3)["bos_token_id"] == 1
    assert files.build_generation_config(3, 5)["bos_token_id"] == 5
    found = load_pretrained_files(str(source), None, SHA256).tokenizer_config
    eos = EMBEDDED_EOS_TOKEN
    for bos, expected in ((None, "<|bos|>"), (eos, eos)):
        files_of_run = build_tokenizer_files(EMBEDDED_FILE, eos, 64, found, bos)
        config = json.loads(files_of_run["tokenizer_config.json"])
        assert (config["bos_token"], config["add_bos_token"]) == (expected, bos is not None)


def test_the_chat_template_renders_and_prompts_get_no_bos(source: Path, tmp_path: Path) -> None:
    found = load_pretrained_files(str(source), None, SHA256)
    files = build_tokenizer_files(EMBEDDED_FILE, EMBEDDED_EOS_TOKEN, 64, found.tokenizer_config)
    out = tmp_path / "out"
    out.mkdir()
    for name, content in {**files, **found.documents}.items():
        (out / name).write_bytes(content)
    (out / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|bos|>[x]"
    assert tokenizer.bos_token_id not in tokenizer("def main():")["input_ids"]
    assert tokenizer.model_max_length == 64
