"""Cuts long documents where the tokenizer would cut them anyway.

A book is longer than a batch, and some documents are longer than memory would like. They are
tokenised a piece at a time, and the tokens must be those of the whole: so a document is only cut
where no token can reach across and where a scan that begins anew goes on as the one before would
have. Which cuts those are is found out by asking the tokenizer; one that has none tokenises whole.
"""

import json
import re
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import tokenizers

_GRAPHIC = range(0x21, 0x7F)
"""ASCII characters that are neither space nor control."""
_CROSSING = re.compile("[!-~][ Ġ▁]")
"""A token that reaches from a graphic character over a space, however the vocabulary spells it."""
_ESCAPED = re.compile("[\ud800-\udfff]")
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"})
"""They map a text that is cut before a space as they map its parts, but for what they prepend."""
_SPACES = frozenset(" Ġ▁")
_KNOWN_STEPS = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
)
_BYTE_LEVEL = (["ByteLevel"], ["Split", "ByteLevel"])
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
"""What the expressions of GPT-2, GPT-4 and 4o, Llama 3 and Qwen are made of."""
_FOLLOWING = ("a", "1", ".", " ", "\n", "木", "\u0301")
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
class Cuts:
    """Where a tokenizer's documents may be cut."""

    before_spaces: bool = False
    """Whether a document may be cut between a graphic ASCII character and a space."""
    drop_space: bool = False
    """Whether the space that a piece begins with is left out, as the tokenizer prepends one."""
    words: tokenizers.pre_tokenizers.PreTokenizer | None = None
    """What tells the words of a text without spaces, between which it may be cut; or none may."""

    def end(self, document: memoryview, start: int, size: int) -> int:
        """Byte at which the piece that begins at `start` ends: the document's end or a cut.

        It holds at most `size` bytes, unless no cut is among them.
        """
        stop = start + size
        while self.before_spaces and stop < len(document):
            window = bytes(document[start:stop])
            cut = _last_space(window, size // 2)
            if cut is None and self.words is not None and len(window) >= 4 * size:
                cut = _last_word(window, self.words)
            if cut is not None:
                return start + cut
            stop += stop - start
        return len(document)

    def range(self, start: int, end: int) -> tuple[int, int]:
        """The bytes of a piece that the tokenizer is given."""
        return (start + 1 if start and self.drop_space else start), end


def _last_space(window: bytes, least: int) -> int | None:
    """Offset of the last space that follows a graphic character, beyond `least`."""
    cut = window.rfind(b" ", least + 1)
    while cut > 0 and window[cut - 1] not in _GRAPHIC:
        cut = window.rfind(b" ", least + 1, cut)
    return cut if cut > 0 else None


def _last_word(window: bytes, words: tokenizers.pre_tokenizers.PreTokenizer) -> int | None:
    """Offset at which a word ends, the last one that has two after it and ends in no space.

    A word is known once the one after it is: no pre-tokenizer in use looks further ahead. Spaces
    at the end of a text are another matter than the same ones in front of a word.
    """
    # A character for each byte that is not UTF-8: punctuation, as U+FFFD is, however many they are
    text = window.decode("utf-8", "surrogateescape")
    found = words.pre_tokenize_str(_ESCAPED.sub("\ufffd", text))
    ends = (stop for _, (_, stop) in reversed(found[:-2]))
    stop = next((stop for stop in ends if not text[stop - 1].isspace()), 0)
    return len(text[:stop].encode("utf-8", "surrogateescape")) or None


def find_cuts(rust: tokenizers.Tokenizer) -> Cuts:
    """Ask a tokenizer where its documents may be cut.

    A cut between a graphic ASCII character x and a space is exact if four things hold:

    1. no token of the vocabulary reaches over such a place, so that merges (or the best
       segmentation) left and right of it never meet, and a space is not unknown text, which would
       fuse with unknown neighbours;
    2. the pre-tokenizer, if there is one that splits, is of a kind that splits there, looks at
       nothing behind, and scans from left to right: a scan that begins there goes on as the whole;
    3. normalization is local;
    4. no added token reaches over it.

    Between the words of byte-level tokenizers a scan may begin anew, too, if nothing changes the
    text before it. A tokenizer that prepends a space to every text does so to every piece, which is
    made up for by leaving one out; with added tokens it prepends to what lies between them as well,
    and is given whole documents. Samples, cut at every place, decide at last.
    """
    steps = _steps(_definition(rust)["pre_tokenizer"])
    if not (_no_token_crosses(rust) and _is_local(rust) and all(map(_is_known, steps))):
        return Cuts()
    if not _splits_before_spaces(rust):
        return Cuts()
    candidates = [Cuts(before_spaces=True)]
    if not _added(rust):
        candidates.append(Cuts(before_spaces=True, drop_space=True))
        if rust.normalizer is None and [step["type"] for step in steps] in _BYTE_LEVEL:
            candidates.insert(0, Cuts(before_spaces=True, words=rust.pre_tokenizer))
    return next((cuts for cuts in candidates if _is_exact(rust, cuts)), Cuts())


def _is_known(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer looks at nothing behind, and at most at the next character ahead."""
    if step["type"] != "Split":
        return step["type"] in _KNOWN_STEPS
    pattern = step["pattern"].get("Regex", "")
    is_plain = step["behavior"] == "Isolated" and not step["invert"]
    return is_plain and set(_alternatives(pattern)) <= _KNOWN_ALTERNATIVES


def _alternatives(pattern: str) -> list[str]:
    """The parts of a regular expression between the bars outside of brackets."""
    parts, depth = [""], 0
    for character in re.findall(r"\\.|.", pattern, re.DOTALL):
        depth += (character in "([") - (character in ")]")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _added(rust: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
    """The added tokens that are found in documents; special ones are text there."""
    return [token for token in rust.get_added_tokens_decoder().values() if not token.special]


def _no_token_crosses(rust: tokenizers.Tokenizer) -> bool:
    if any(token.lstrip or token.rstrip or token.single_word for token in _added(rust)):
        return False
    vocabulary = rust.get_vocab(with_added_tokens=True)
    is_space_known = _splits(rust) or not _SPACES.isdisjoint(vocabulary)
    return is_space_known and not any(map(_CROSSING.search, vocabulary))


def _is_local(rust: tokenizers.Tokenizer) -> bool:
    return all(_is_local_step(step) for step in _steps(_definition(rust)["normalizer"]))


def _is_local_step(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) == ({"String": " "}, "▁")
    return step["type"] in _LOCAL_NORMALIZERS


def _definition(rust: tokenizers.Tokenizer) -> dict[str, Any]:
    definition: dict[str, Any] = json.loads(rust.to_str())
    return definition


def _steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, in order."""
    if component is None:
        return []
    parts = component.get("normalizers") or component.get("pretokenizers")
    return [step for part in parts for step in _steps(part)] if parts else [component]


def _splits(rust: tokenizers.Tokenizer) -> bool:
    """Whether the pre-tokenizer makes words; Llama 2's only marks the spaces."""
    steps = _steps(_definition(rust)["pre_tokenizer"])
    return any(step.get("split", True) for step in steps)


def _splits_before_spaces(rust: tokenizers.Tokenizer) -> bool:
    """Whether the words around a space after any x are those of the two sides alone.

    True, too, if the pre-tokenizer makes no words.
    """
    if not _splits(rust):
        return True
    before = ("a", "1", ".", " ", "\n", "木", "")
    heads = [left + x for left, x in product(before, map(chr, _GRAPHIC))]
    tails = {f" {right}": _words(rust, f" {right}") for right in _FOLLOWING}
    return all(
        _words(rust, head + tail) == _words(rust, head) + words
        for head in heads
        for tail, words in tails.items()
    )


def _words(rust: tokenizers.Tokenizer, text: str) -> list[str]:
    return [word for word, _ in rust.pre_tokenizer.pre_tokenize_str(text)]


def _is_exact(rust: tokenizers.Tokenizer, cuts: Cuts) -> bool:
    """Whether samples, cut into pieces of many sizes, have the tokens of the whole."""
    for sample, size in product(_SAMPLES, (1, 2, 3, 5, 8, 13, 21, 34)):
        document = memoryview(sample.encode())
        ranges = [cuts.range(*piece) for piece in pieces(document, cuts, size)]
        texts = [str(document[start:end], "utf-8") for start, end in ranges]
        found = rust.encode_batch_fast([sample, *texts], add_special_tokens=False)
        whole, *parts = [encoding.ids for encoding in found]
        if list(chain.from_iterable(parts)) != whole:
            return False
    return True


def pieces(document: memoryview, cuts: Cuts, size: int) -> list[tuple[int, int]]:
    """Start and end of every piece of a document, of about `size` bytes."""
    found = [(0, cuts.end(document, 0, size))]
    while found[-1][1] < len(document):
        start = found[-1][1]
        found.append((start, cuts.end(document, start, size)))
    return found
