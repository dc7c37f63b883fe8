"""Test that documents are never encoded as special tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from hlat.config.config_errors import ConfigError
from hlat.config.data import EncoderLibrary
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer

TEXTS = [
    "def main():\n\treturn 1  # été\r\n",
    "".join(map(chr, range(32, 0x250))),
    "\x00\x7f 木 😀 \u200b e\u0301",
    "   leading and trailing   ",
]


@pytest.fixture(params=EncoderLibrary, ids=lambda encoder: encoder.value)
def tokenizer(eos, request) -> Tokenizer:
    return Tokenizer("embedded", ".", eos, request.param)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write the embedded tokenizer with changes and return its directory."""

    def write_(**changes: object) -> str:
        content = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8")) | changes
        (tmp_path / "changed.json").write_text(json.dumps(content))
        return str(tmp_path)

    return write_


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert ids.dtype == np.int32
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1].tolist()) == text


def test_size_of_the_embedded_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 4096
    assert 0 <= tokenizer.eos_token_id < 4096


def test_control_tokens_in_text_are_encoded_as_text(tokenizer: Tokenizer, eos) -> None:
    text = f"before {eos} after{eos}"
    (ids,) = tokenizer.encode([text])
    assert tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.decode(ids.tolist()) == text + eos


def test_empty_text_has_no_tokens_and_no_eos(tokenizer: Tokenizer) -> None:
    assert [len(ids) for ids in tokenizer.encode(["", "a", ""])] == [0, 2, 0]
    assert tokenizer.encode([]) == []


def test_chunks_have_no_eos(tokenizer: Tokenizer) -> None:
    whole, pieces = tokenizer.encode(TEXTS), tokenizer.encode_chunks(TEXTS)
    assert [ids.dtype for ids in pieces] == [np.int32] * len(TEXTS)
    assert [ids[:-1].tolist() for ids in whole] == [ids.tolist() for ids in pieces]
    assert tokenizer.encode_chunks([]) == []


@pytest.fixture(params=EncoderLibrary, ids=lambda encoder: encoder.value)
def with_bos(eos, bos, bos_tokenizer_file, request) -> Tokenizer:
    return Tokenizer(str(bos_tokenizer_file), ".", eos, request.param, bos)


def test_bos_precedes_each_document_that_has_tokens(with_bos: Tokenizer, tokenizer, bos) -> None:
    documents = [*TEXTS, "", f"text with {bos}"]
    assert with_bos.bos_token_id == 4096
    assert with_bos.vocab_size == 4097
    assert tokenizer.bos_token_id is None
    plain = tokenizer.encode(documents)
    for found, expected in zip(with_bos.encode(documents), plain, strict=True):
        assert found.dtype == np.int32
        assert found.tolist() == ([4096, *expected.tolist()] if len(expected) else [])
    assert [ids.tolist() for ids in with_bos.encode_chunks(documents)] == [
        ids[:-1].tolist() for ids in plain
    ]


def test_bos_and_eos_delimit_the_first_and_last_chunk_of_a_document(
    with_bos: Tokenizer, tokenizer: Tokenizer
) -> None:
    ids, eos_id = np.array([5, 6], np.int32), tokenizer.eos_token_id
    for is_first, is_last, prefix, suffix in (
        (True, True, [4096], [eos_id]),
        (True, False, [4096], []),
        (False, False, [], []),
        (False, True, [], [eos_id]),
    ):
        joined, ends = with_bos.join_documents([ids], is_first, is_last)
        assert joined.tolist() == [*prefix, 5, 6, *suffix]
        assert ends == [len(joined)]
        joined, _ = tokenizer.join_documents([ids], is_first, is_last)
        assert joined.tolist() == [5, 6, *suffix]
    joined, ends = with_bos.join_documents([ids[:0]], is_last=False)
    assert (joined.tolist(), ends) == ([4096], [1])


def test_joined_documents_end_after_their_eos(with_bos: Tokenizer) -> None:
    eos_id = with_bos.eos_token_id
    documents = [np.array(ids, np.int32) for ids in ([], [5, 6], [], [7])]
    joined, ends = with_bos.join_documents(documents)
    assert joined.tolist() == [4096, 5, 6, eos_id, 4096, 7, eos_id]
    assert ends == [0, 4, 4, 7]
    joined, ends = with_bos.join_documents([])
    assert (joined.tolist(), joined.dtype, ends) == ([], np.int32, [])


def test_bos_and_eos_may_be_the_same_token(eos) -> None:
    tokenizer = Tokenizer("embedded", ".", eos, bos_token=eos)
    (ids,) = tokenizer.encode(["a"])
    assert ids[[0, -1]].tolist() == [tokenizer.eos_token_id] * 2
    assert len(ids) == 3


@pytest.mark.parametrize("token", ["<s>", ""])
def test_a_missing_bos_token_lists_the_special_ones(eos, token: str) -> None:
    with pytest.raises(ConfigError) as error:
        Tokenizer("embedded", ".", eos, bos_token=token)
    assert str(error.value) == (
        f"data.bos_token={token} is not a token of {EMBEDDED_FILE}; its special tokens are: {eos}"
    )


def test_bos_without_special_flag_is_rejected(eos) -> None:
    with pytest.raises(ConfigError) as error:
        Tokenizer("embedded", ".", eos, bos_token="the")
    (problem,) = error.value.problems
    assert problem.startswith("data.bos_token=the: a document that contains this text would get")
    assert "and seem to start there; choose a token that is special" in problem


def test_errors_for_both_delimiters_are_combined(write) -> None:
    root = write(added_tokens=[_added(0, "<|endoftext|>", special=False)])
    with pytest.raises(ConfigError) as error:
        Tokenizer("changed.json", root, "<|endoftext|>", bos_token="the")
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        "data.eos_token=<|endoftext|>",
        "data.bos_token=the",
    ]


def _added(number: int, content: str, special: bool) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


@pytest.mark.parametrize("added_content", ["the", "<|endoftext|>"])
def test_eos_without_special_flag_is_rejected(added_content: str, write) -> None:
    """Test a token of the vocabulary and an added token that is not special."""
    root = write(added_tokens=[_added(0, "<|endoftext|>", special=False)])
    with pytest.raises(ConfigError) as error:
        Tokenizer("changed.json", root, added_content)
    assert str(error.value).startswith(
        f"data.eos_token={added_content}: a document that contains this text would get its id"
    )


def test_control_tokens_in_a_unigram_vocabulary_are_rejected(tmp_path: Path) -> None:
    """Use a Unigram model, which matches its vocabulary even if special tokens are disabled."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), *((c, -1.0) for c in " ab<>/spd")]
    rust = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    rust.add_special_tokens(["</s>", "<pad>"])
    rust.save(str(tmp_path / "unigram.json"))
    with pytest.raises(ConfigError) as error:
        Tokenizer("unigram.json", str(tmp_path), "</s>")
    first, second = str(error.value).splitlines()
    assert first.startswith("data.eos_token=</s>: a document that contains this text")
    assert second.startswith(
        "data.tokenizer=unigram.json: documents that contain the text <pad> would get the ids"
    )


def test_unknown_token_is_not_a_control_token(tmp_path: Path) -> None:
    rust = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    rust.add_special_tokens(["<unk>", "<end>"])
    rust.save(str(tmp_path / "small.json"))
    tokenizer = Tokenizer("small.json", str(tmp_path), "<end>", max_lost_text=1.0)
    (ids,) = tokenizer.encode(["a<unk>"])
    assert ids.tolist() == [1, 0, 0, 0, 0, 0, 2]


def test_bpe_dropout_is_rejected(write, eos) -> None:
    model = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8"))["model"] | {"dropout": 0.5}
    with pytest.raises(ConfigError, match=r"changed\.json merges at random \(dropout=0\.5\)"):
        Tokenizer("changed.json", write(model=model), eos)


def test_truncation_and_padding_of_the_file_are_ignored(write, eos) -> None:
    settings = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    root = write(truncation=settings)
    plain, cut = Tokenizer("embedded", ".", eos), Tokenizer("changed.json", root, eos)
    assert cut.encode([TEXTS[0]])[0].tolist() == plain.encode([TEXTS[0]])[0].tolist()
    assert cut.sha256 != plain.sha256


def test_a_missing_eos_token_lists_the_special_ones(eos) -> None:
    with pytest.raises(ConfigError) as error:
        Tokenizer("embedded", ".", "</s>")
    assert str(error.value) == (
        f"data.eos_token=</s> is not a token of {EMBEDDED_FILE}; its special tokens are: {eos}"
    )


def test_missing_and_invalid_files_are_errors(tmp_path: Path, eos) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer=no\.json: cannot read .*/no\.json"):
        Tokenizer("no.json", str(tmp_path), eos)
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenizer("", str(tmp_path), eos)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a tokenizer\.json"):
        Tokenizer("bad.json", str(tmp_path), eos)
