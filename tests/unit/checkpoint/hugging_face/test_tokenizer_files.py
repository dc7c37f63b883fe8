"""Test that AutoTokenizer gives the ids of training for an exported tokenizer."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from hlat.checkpoint.hugging_face.tokenizer_files import build_tokenizer_files, find_tokenizer_file
from hlat.data.prompt_tokenizer import (
    PromptTokenizer,
    find_added_bos_token,
    load_hugging_face_tokenizer,
    load_run_tokenizer,
)
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE, Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "def main():\n\treturn 1  # été\r\n",
    "   leading and trailing   ",
    "木 😀 \u200b e\u0301 don't , stop .",
    "a",
]


def bytes_tokenizer(**parts: Any) -> tokenizers.Tokenizer:
    """Build a tokenizer of all bytes and the special tokens <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    rust.add_special_tokens(["<s>", "</s>"])
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(rust, name, part)
    return rust


BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
TOKENIZERS = {
    "embedded": None,
    "bos": bytes_tokenizer(post_processor=BOS),
    "bos after offsets": bytes_tokenizer(
        post_processor=processors.Sequence([processors.ByteLevel(), BOS])
    ),
    "prefix space": bytes_tokenizer(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.fixture(params=TOKENIZERS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rust = TOKENIZERS[request.param]
    if rust is None:
        return EMBEDDED_FILE
    rust.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def export(file: Path, folder: Path, eos: str, bos: str | None = None) -> Any:
    folder.mkdir()
    for name, content in build_tokenizer_files(file, eos, 64, bos_token=bos).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_ids_equal_those_of_training_without_bos(file: Path, tmp_path: Path) -> None:
    eos = EMBEDDED_EOS_TOKEN if file == EMBEDDED_FILE else "</s>"
    ours = Tokenizer(str(file), ".", eos)
    theirs = export(file, tmp_path / "out", eos)
    for text, ids in zip(TEXTS, ours.encode_chunks(TEXTS), strict=True):
        found = theirs(text)
        assert found["input_ids"] == ids.tolist()
        assert set(found) == {"input_ids", "attention_mask"}
        assert theirs.decode(ids) == ours.decode(ids.tolist())
    assert theirs.eos_token_id == ours.eos_token_id
    assert theirs.bos_token is None
    assert theirs.model_max_length == 64


BOTH = processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
)
END = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 257)])
WITH_OTHER_TOKENS = {
    "bos and eos": bytes_tokenizer(post_processor=BOTH),
    "eos": bytes_tokenizer(post_processor=END),
    "none": bytes_tokenizer(),
}


@pytest.mark.parametrize("name", [*TOKENIZERS, *WITH_OTHER_TOKENS])
def test_ids_equal_those_of_training_with_bos(name: str, tmp_path: Path) -> None:
    file, eos, bos = EMBEDDED_FILE, EMBEDDED_EOS_TOKEN, EMBEDDED_EOS_TOKEN
    rust = (TOKENIZERS | WITH_OTHER_TOKENS)[name]
    if rust is not None:
        file, eos, bos = tmp_path / "tokenizer.json", "</s>", "<s>"
        rust.save(str(file))
    ours = Tokenizer(str(file), ".", eos, bos_token=bos)
    theirs = export(file, tmp_path / "out", eos, bos)
    prompts = load_hugging_face_tokenizer(tmp_path / "out")
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        document = ids[:-1].tolist()
        assert theirs(text)["input_ids"] == document
        assert theirs(text, add_special_tokens=False)["input_ids"] == document[1:]
        assert prompts.encode(text) == document
        assert prompts.encode(text, is_prompt_start=False) == document[1:]
        assert load_run_tokenizer(file, eos, bos).encode(text) == document
    assert (theirs.bos_token, theirs.bos_token_id) == (bos, ours.bos_token_id)
    assert theirs.eos_token_id == ours.eos_token_id
    assert prompts.prefix_token_id == ours.bos_token_id
    is_copy = (tmp_path / "out/tokenizer.json").read_bytes() == file.read_bytes()
    assert is_copy == (name in ("bos", "bos after offsets"))
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)


@pytest.mark.parametrize("name", [*TOKENIZERS, *WITH_OTHER_TOKENS])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_find_the_bos_that_a_tokenizer_adds(
    name: str, add_bos_token: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Apply the post-processor of tokenizer.json, as transformers 5 does."""
    if (rust := (TOKENIZERS | WITH_OTHER_TOKENS)[name]) is None:
        rust = bytes_tokenizer()
    rust.save(str(tmp_path / "tokenizer.json"))
    assert find_added_bos_token(tmp_path) is None  # lacks tokenizer_config.json
    config = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": add_bos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    is_added = name in ("bos", "bos after offsets", "bos and eos")
    assert find_added_bos_token(tmp_path) == ("<s>" if is_added else None)
    contradicts = add_bos_token not in (None, is_added)
    assert ("WARNING" in capsys.readouterr().err) == contradicts
    if name != "bos and eos":
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs("a")["input_ids"] == load_hugging_face_tokenizer(tmp_path).encode("a")


def test_prompts_of_a_run_without_bos_start_with_eos() -> None:
    plain = load_run_tokenizer(EMBEDDED_FILE, EMBEDDED_EOS_TOKEN)
    ours = Tokenizer(str(EMBEDDED_FILE), ".", EMBEDDED_EOS_TOKEN)
    (ids,) = ours.encode_chunks(["a b"])
    assert plain.encode("a b") == ids.tolist()
    assert plain.prefix_token_id == ours.eos_token_id


def test_tokenizer_without_added_tokens_is_copied_unchanged() -> None:
    assert (
        build_tokenizer_files(EMBEDDED_FILE, EMBEDDED_EOS_TOKEN, 64)["tokenizer.json"]
        == EMBEDDED_FILE.read_bytes()
    )


def test_truncation_and_padding_are_removed(tmp_path: Path) -> None:
    rust = bytes_tokenizer()
    rust.enable_truncation(4)
    rust.enable_padding(length=8)
    rust.save(str(tmp_path / "tokenizer.json"))
    found = json.loads(
        build_tokenizer_files(tmp_path / "tokenizer.json", "</s>", 64)["tokenizer.json"]
    )
    assert (found["truncation"], found["padding"]) == (None, None)
    assert (
        len(export(tmp_path / "tokenizer.json", tmp_path / "out", "</s>")("abcdef").input_ids) == 6
    )


def test_file_is_found_by_its_hash(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(EMBEDDED_FILE.read_bytes()).hexdigest()
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    assert (
        find_tokenizer_file(sha256, [tmp_path, other, tmp_path / "nowhere", EMBEDDED_FILE])
        == EMBEDDED_FILE
    )
    assert find_tokenizer_file(sha256, [tmp_path, other]) is None


def test_special_tokens_are_read_once(tmp_path: Path) -> None:
    """A text is searched for them at its start; tokenizers of Gemma have 6,000."""
    rust = bytes_tokenizer()
    rust.add_special_tokens([f"<unused{i}>" for i in range(6000)])
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PromptTokenizer(tmp_path / "tokenizer.json", "</s>", None, False)
    names = ["a", "</s>", "<unused0>"]
    assert tokenizer.find_special_token_ids(names) == {257, 258}
    tokenizer._tokenizer = None  # a further read would fail
    assert tokenizer.find_special_token_ids(names) == {257, 258}
