"""Division of long documents into chunks that a tokenizer encodes separately.

A document may exceed the memory of a batch, so it is tokenized in chunks. The tokens must equal
those of the complete document: it is divided only where no token crosses and where pre-tokenization
can restart. Properties of the tokenizer determine these positions; if there are none, documents are
tokenized in one chunk.
"""

import functools
import json
import re
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import tokenizers

_GRAPHIC_ASCII = range(0x21, 0x7F)
"""ASCII characters except spaces and control characters."""
_CROSSING_TOKEN = re.compile("[!-~][ Ġ▁]")
"""Token with a space after a graphic character, in any spelling of the vocabulary."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"})
"""Normalizers that, except for a prefix, map both sides of a space independently."""
_SPACES = frozenset(" Ġ▁")
_KNOWN_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
)
_BYTE_LEVEL_PRE_TOKENIZERS = (["ByteLevel"], ["Split", "ByteLevel"])
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_KNOWN_ALTERNATIVES = frozenset(
    {
        *_CONTRACTIONS,
        f"(?i:{'|'.join(_CONTRACTIONS)})",
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{'|'.join(_CONTRACTIONS)})?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{'|'.join(_CONTRACTIONS)})?",
        r" ?\p{N}+",
        r"\p{N}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    }
)
"""Alternatives in the patterns of GPT-2, GPT-4, GPT-4o, Llama 3 and Qwen."""
_FOLLOWING_CHARACTERS = ("a", "1", ".", " ", "\n", "木", "\u0301")
_SAMPLES = (
    "The quick brown fox's 3 cubs -- isn't it? -- jumped;\n\n    over (12,345.67) fences.\r\n"
    "def f(x):\n\treturn x ** 2  # squared\n  été naïve Ünïcode 木曜日 は 晴れ 😀 👩‍👩‍👧  "
    "\u0645\u0631\u062d\u0628\u0627  \u043d\u0430\u0443\u043a\u0430 "
    "a b  c   d\te \n f\n\n\ng ... !!! ## __init__ https://x.org/?q=1&r=%20 "
    "0x1F 1e-9 ''' \"\"\" end",
    "木曜日は晴れ、気温は二十度。\n\n明日は雨が降るでしょう。東京都、千代田区。\r\n\r\n「はい」と言った。",
    "aGVsbG8+d29ybGQ/Zm9v/YmFy==\n\nACGTACGT0123456789,-1.5e+10;x'll'LL\t\t[{}]()\\n\n\n\n;;",
)


@dataclass(frozen=True)
class DocumentChunker:
    """Rule that divides documents into chunks without a change of their tokens."""

    split_before_spaces: bool = False
    """Divide between a graphic ASCII character and a space."""
    drop_space: bool = False
    """Remove the space at the start of a chunk, because the tokenizer prepends one."""
    pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer | None = None
    """Pre-tokenizer for text without spaces, which is divided between its words; None disables."""

    def find_chunk_end(self, document: memoryview, start: int, chunk_bytes: int) -> int:
        """Return the end of the chunk at `start`, in bytes.

        A chunk has at most `chunk_bytes` bytes if the document can be divided there.
        """
        stop = start + chunk_bytes
        while self.split_before_spaces and stop < len(document):
            window = bytes(document[start:stop])
            length = _find_last_space(window, chunk_bytes // 2)
            if length is None and self.pre_tokenizer is not None and len(window) >= 4 * chunk_bytes:
                length = _find_last_word(window, self.pre_tokenizer)
            if length is not None:
                return start + length
            stop += stop - start
        return len(document)

    def get_encoded_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of a chunk that the tokenizer encodes."""
        return (start + 1 if start and self.drop_space else start), end


def _find_last_space(window: bytes, min_offset: int) -> int | None:
    """Return the offset beyond `min_offset` of the last space after a graphic character."""
    offset = window.rfind(b" ", min_offset + 1)
    while offset > 0 and window[offset - 1] not in _GRAPHIC_ASCII:
        offset = window.rfind(b" ", min_offset + 1, offset)
    return offset if offset > 0 else None


def _find_last_word(
    window: bytes, pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer
) -> int | None:
    """Return the end of the last word with two words after it and a non-space last character.

    Supported pre-tokenizers look ahead by at most one word. Spaces at the end of a text are split
    differently from spaces before a word.
    """
    # One punctuation character (U+FFFD) per invalid byte preserves the offsets
    text = window.decode("utf-8", "surrogateescape")
    words = pre_tokenizer.pre_tokenize_str(_SURROGATES.sub("\ufffd", text))
    ends = (stop for _, (_, stop) in reversed(words[:-2]))
    stop = next((stop for stop in ends if not text[stop - 1].isspace()), 0)
    return len(text[:stop].encode("utf-8", "surrogateescape")) or None


def build_document_chunker(tokenizer: tokenizers.Tokenizer) -> DocumentChunker:
    """Return the chunker of a tokenizer, which does not divide if that could change tokens.

    A division between a graphic ASCII character and a space is exact if:

    1. no token of the vocabulary crosses it, so merges (or the best segmentation) on the two sides
       are independent, and a space is no unknown text, which would fuse with unknown neighbors;
    2. the pre-tokenizer, if it splits, splits there, has no lookbehind and scans forward,
       so a scan from there continues as a scan of the complete document;
    3. normalization is local;
    4. no added token crosses it.

    Byte-level tokenizers without a normalizer can also be divided between words. A tokenizer that
    prepends a space to every text also prepends it to every chunk, so the space of the chunk is
    removed. With added tokens it prepends a space to the text between them too, and its documents
    are not divided. Finally, samples divided at every position must have the same tokens.
    """
    return _build_document_chunker(tokenizer.to_str())


@functools.lru_cache(maxsize=4)
def _build_document_chunker(text: str) -> DocumentChunker:
    definition, tokenizer = json.loads(text), tokenizers.Tokenizer.from_str(text)
    steps = _flatten_steps(definition["pre_tokenizer"])
    # The pre-tokenizer of Llama 2 only replaces spaces
    is_splitting = any(step.get("split", True) for step in steps)
    is_supported = (
        _has_no_crossing_token(tokenizer, is_splitting)
        and all(map(_is_local_step, _flatten_steps(definition["normalizer"])))
        and all(map(_is_known_step, steps))
        and (not is_splitting or _is_split_before_spaces(tokenizer))
    )
    if not is_supported:
        return DocumentChunker()
    candidates = [DocumentChunker(split_before_spaces=True)]
    if not _list_added_tokens(tokenizer):
        candidates.append(DocumentChunker(split_before_spaces=True, drop_space=True))
        types = [step["type"] for step in steps]
        if tokenizer.normalizer is None and types in _BYTE_LEVEL_PRE_TOKENIZERS:
            pre_tokenizer = tokenizer.pre_tokenizer
            candidates.insert(
                0, DocumentChunker(split_before_spaces=True, pre_tokenizer=pre_tokenizer)
            )
    exact = (chunker for chunker in candidates if _is_exact(tokenizer, chunker))
    return next(exact, DocumentChunker())


def _is_known_step(step: dict[str, Any]) -> bool:
    """Return True for a pre-tokenizer without lookbehind and with one character of lookahead."""
    if step["type"] != "Split":
        return step["type"] in _KNOWN_PRE_TOKENIZERS
    pattern = step["pattern"].get("Regex", "")
    is_plain = step["behavior"] == "Isolated" and not step["invert"]
    return is_plain and set(_split_alternatives(pattern)) <= _KNOWN_ALTERNATIVES


def _split_alternatives(pattern: str) -> list[str]:
    """Split a regular expression at the bars outside brackets."""
    parts, depth = [""], 0
    for character in re.findall(r"\\.|.", pattern, re.DOTALL):
        depth += (character in "([") - (character in ")]")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _list_added_tokens(tokenizer: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
    """Return the added tokens that the tokenizer finds in documents, which exclude special ones."""
    return [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]


def _has_no_crossing_token(tokenizer: tokenizers.Tokenizer, is_splitting: bool) -> bool:
    if any(t.lstrip or t.rstrip or t.single_word for t in _list_added_tokens(tokenizer)):
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_space_known = is_splitting or not _SPACES.isdisjoint(vocabulary)
    return is_space_known and not any(map(_CROSSING_TOKEN.search, vocabulary))


def _is_local_step(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) == ({"String": " "}, "▁")
    return step["type"] in _LOCAL_NORMALIZERS


def _flatten_steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order."""
    if component is None:
        return []
    parts = component.get("normalizers") or component.get("pretokenizers")
    return [step for part in parts for step in _flatten_steps(part)] if parts else [component]


def _is_split_before_spaces(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return True if pre-tokenization of both sides of a space separately gives the same words."""
    before = ("a", "1", ".", " ", "\n", "木", "")
    pre_tokenizer = tokenizer.pre_tokenizer
    heads = (left + x for left, x in product(before, map(chr, _GRAPHIC_ASCII)))
    tails = [f" {right}" for right in _FOLLOWING_CHARACTERS]
    words_of_tails = [_pre_tokenize(pre_tokenizer, tail) for tail in tails]
    return all(
        _pre_tokenize(pre_tokenizer, head + tail) == words + words_of_tail
        for head, words in ((head, _pre_tokenize(pre_tokenizer, head)) for head in heads)
        for tail, words_of_tail in zip(tails, words_of_tails, strict=True)
    )


def _pre_tokenize(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _is_exact(tokenizer: tokenizers.Tokenizer, chunker: DocumentChunker) -> bool:
    """Return True if samples have the same tokens with chunks of many sizes."""
    for sample, chunk_bytes in product(_SAMPLES, (1, 2, 3, 5, 8, 13, 21, 34)):
        document = memoryview(sample.encode())
        chunks = split_document(document, chunker, chunk_bytes)
        ranges = [chunker.get_encoded_range(*chunk) for chunk in chunks]
        texts = [str(document[start:end], "utf-8") for start, end in ranges]
        encodings = tokenizer.encode_batch_fast([sample, *texts], add_special_tokens=False)
        expected, *chunk_ids = [encoding.ids for encoding in encodings]
        if list(chain.from_iterable(chunk_ids)) != expected:
            return False
    return True


def split_document(
    document: memoryview, chunker: DocumentChunker, chunk_bytes: int
) -> list[tuple[int, int]]:
    """Return the start and end of every chunk of a document, of about `chunk_bytes` bytes."""
    chunks = [(0, chunker.find_chunk_end(document, 0, chunk_bytes))]
    while chunks[-1][1] < len(document):
        start = chunks[-1][1]
        chunks.append((start, chunker.find_chunk_end(document, start, chunk_bytes)))
    return chunks
