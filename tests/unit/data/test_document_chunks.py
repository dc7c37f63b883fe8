"""Test that chunks have the tokens of the document for every tokenizer family."""

import json
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from hlat.data.document_chunks import DocumentChunker, build_document_chunker, split_document
from hlat.data.tokenizer import EMBEDDED_FILE

WORDS = [
    "The",
    "quick",
    "fox's",
    "été",
    "木曜日は",
    "x+=1;",
    "12,345.67",
    "\n",
    "\n\n  ",
    "\t",
    "",
    "__init__",
    "😀",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel.alphabet()


def make_documents(count):
    rng = random.Random(5)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 200))) for _ in range(count)]


def train(model, pre_tokenizer, normalizer=None, **options):
    rust = Tokenizer(model)
    rust.pre_tokenizer, rust.normalizer = pre_tokenizer, normalizer
    kind = trainers.UnigramTrainer if isinstance(model, models.Unigram) else trainers.BpeTrainer
    trainer = kind(vocab_size=500, show_progress=False, **options)
    rust.train_from_iterator([*make_documents(150), *map(chr, range(33, 127))], trainer)
    return rust


def byte_level(*before, normalizer=None, add_prefix_space=False, use_regex=True):
    last = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    return train(
        models.BPE(),
        pre_tokenizers.Sequence([*before, last]),
        normalizer,
        initial_alphabet=BYTES,
    )


def sentencepiece(split):
    """Build a tokenizer like Llama 2's, with spaces replaced by the normalizer if `split` is None."""
    always = pre_tokenizers.Metaspace(prepend_scheme="always")
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    rust = train(model, always, special_tokens=["<unk>", *fallback])
    definition = json.loads(rust.to_str())
    definition["added_tokens"] = []
    if split is None:
        definition["pre_tokenizer"] = None
        definition["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    else:
        definition["pre_tokenizer"]["split"] = split
        definition["pre_tokenizer"]["prepend_scheme"] = "first"
    return Tokenizer.from_str(json.dumps(definition))


def with_added_tokens(rust):
    rust.add_tokens(["<tool>", "    ", " was", "12"])
    return rust


FAMILIES = {
    "embedded": lambda: Tokenizer.from_file(str(EMBEDDED_FILE)),
    "gpt2": byte_level,
    "gpt2 with a prefix": lambda: byte_level(add_prefix_space=True),
    "llama3": lambda: byte_level(
        pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated"), use_regex=False
    ),
    "added tokens": lambda: with_added_tokens(byte_level()),
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "metaspace": lambda: sentencepiece(split=True),
    "metaspace unsplit": lambda: sentencepiece(split=False),
    "llama2": lambda: sentencepiece(split=None),
    "unigram": lambda: train(
        models.Unigram(),
        pre_tokenizers.Metaspace(),
        unk_token="<unk>",
        special_tokens=["<unk>"],
    ),
    "words": lambda: train(models.BPE(), pre_tokenizers.WhitespaceSplit()),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    rust = FAMILIES[request.param]()
    rust.encode_special_tokens = True
    return rust, build_document_chunker(rust)


def encode_both(rust, chunker, text, size):
    document = memoryview(text.encode())
    ranges = [
        chunker.get_encoded_range(*piece) for piece in split_document(document, chunker, size)
    ]
    chunks = [str(document[start:end], "utf-8") for start, end in ranges]
    whole, *parts = rust.encode_batch_fast([text, *chunks], add_special_tokens=False)
    return whole.ids, [token for part in parts for token in part.ids], len(chunks)


def test_all_families_support_chunks(family) -> None:
    assert family[1].split_before_spaces


@settings(max_examples=60)
@given(
    strings=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=60),
    size=st.integers(1, 60),
)
def test_chunks_have_the_tokens_of_the_document(family, strings, size) -> None:
    rust, chunker = family
    whole, parts, _ = encode_both(rust, chunker, " ".join(strings), size)
    assert parts == whole


def test_chunks_have_about_the_requested_size(family) -> None:
    rust, chunker = family
    text = "\n".join(make_documents(30))
    whole, parts, count = encode_both(rust, chunker, text, 400)
    assert parts == whole
    assert len(text.encode()) / 400 <= count <= len(text.encode()) / 200 + 1


def test_text_without_spaces_is_split_at_word_boundaries() -> None:
    rust = FAMILIES["embedded"]()
    chunker = build_document_chunker(rust)
    whole, parts, count = encode_both(
        rust, chunker, "木曜日は、晴れ。\n\n" * 500 + "ab12+/" * 500, 200
    )
    assert parts == whole
    assert count > 20
    word = memoryview(b"a" * 5000)
    assert split_document(word, chunker, 200) == [(0, 5000)]


def test_text_with_invalid_bytes_is_split() -> None:
    chunker = build_document_chunker(FAMILIES["embedded"]())
    text = ("木曜日は、晴れ。" * 300).encode()
    for bad in (b"\xff", b"\xe6\x9c", b"\xf0\x9f\x98", b"\xff\xfe\xc3" * 5):
        document = memoryview(text + bad + text + bad)
        found = split_document(document, chunker, 300)
        assert len(found) > 10
        whole = str(document, "utf-8", "replace")
        assert "".join(str(document[a:b], "utf-8", "replace") for a, b in found) == whole


def test_invalid_utf8_does_not_split_characters() -> None:
    chunker = build_document_chunker(FAMILIES["embedded"]())
    document = memoryview(("木é、" * 40).encode() + b"\xff\xfe" + ("été 木 " * 50).encode())
    found = split_document(document, chunker, 50)
    whole = str(document, "utf-8", "replace")
    assert "".join(str(document[a:b], "utf-8", "replace") for a, b in found) == whole


def superwords():
    """Build a tokenizer with tokens that cross spaces."""
    return Tokenizer(
        models.BPE({"a": 0, " ": 1, "b": 2, "a ": 3, "a b": 4}, [("a", " "), ("a ", "b")])
    )


def digits_with_spaces():
    rust = FAMILIES["gpt2"]()
    rust.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\d+ \d+|\w+|\W"), "isolated")
    return rust


def falcon():
    """Build a tokenizer that finds digits inside byte-level characters."""
    rust = FAMILIES["gpt2"]()
    last = pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(),
            last,
        ]
    )
    return rust


def quotations():
    rust = FAMILIES["gpt2"]()
    pattern = tokenizers.Regex(r'"[^"]*"| ?\w+| ?[^\s\w]+|\s+')
    rust.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    return rust


def llama2_with_an_added_token():
    """Build a tokenizer that also prepends a space after an added token."""
    rust = FAMILIES["llama2"]()
    rust.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return rust


def spaces_removed():
    rust = FAMILIES["gpt2"]()
    rust.normalizer = normalizers.Replace(" ", "")
    return rust


def unknown_spaces():
    model = models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>", fuse_unk=True)
    return Tokenizer(model)


def looks_behind():
    rust = FAMILIES["gpt2"]()
    behind = tokenizers.Regex(r"(?<=\d) [a-z]+|[^ ]+| ")
    rust.pre_tokenizer = pre_tokenizers.Split(behind, "isolated")
    return rust


def strips():
    rust = FAMILIES["gpt2"]()
    rust.normalizer = normalizers.Strip()
    return rust


def greedy_added_token():
    rust = FAMILIES["gpt2"]()
    rust.add_tokens([tokenizers.AddedToken("x y", lstrip=True)])
    return rust


@pytest.mark.parametrize(
    "make",
    [
        superwords,
        digits_with_spaces,
        looks_behind,
        strips,
        greedy_added_token,
        falcon,
        quotations,
        llama2_with_an_added_token,
        spaces_removed,
        unknown_spaces,
    ],
)
def test_tokenizers_with_tokens_across_spaces_do_not_split_documents(make) -> None:
    chunker = build_document_chunker(make())
    assert chunker == DocumentChunker()
    assert split_document(memoryview(b"some words " * 99), chunker, 50) == [(0, 11 * 99)]
