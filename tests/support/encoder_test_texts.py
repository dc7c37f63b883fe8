"""Strings and code points on which two encoders are most likely to differ.

Libraries that read the same tokenizer.json differ on unusual text: code points of newer Unicode
versions, runs of white space, digits, composing marks, long words. Ordinary text would not reveal
the difference, and a single such document changes a run.
"""

import itertools
import random
import string
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from hlat.config.config_errors import ConfigError
from hlat.data import embedded_corpus

CODE_POINTS = (range(0xD800), range(0xE000, sys.maxunicode + 1))
"""All code points except surrogates."""
CHARACTERS_PER_DOCUMENT = 4096
"""Characters to compare of each document of the embedded corpus."""
TEXTS_PER_KIND = 100

_UNASSIGNED_PLANES = frozenset({*range(4, 14), 15, 16})
"""Unicode planes that contain only private use."""
_LATE_COMPOSITIONS = (
    "\U000105d2\u0307 \U000105da\u0307 \U00011382\U000113c9 \U00011384\U000113bb "
    "\U0001138b\U000113c2 \U00011390\U000113c9 \U000113c2\U000113c2 \U000113c2\U000113b8 "
    "\U000113c2\U000113c9 \U0001611e\U0001611e \U0001611e\U00016129 \U0001611e\U0001611f "
    "\U00016129\U0001611f \U0001611e\U00016120 \U0001611e\U0001611e\U0001611f "
    "\U0001611e\U00016129\U0001611f \U0001611e\U0001611e\U00016120 \U00016d67\U00016d67 "
    "\U00016d63\U00016d67 \U00016d63\U00016d67\U00016d67"
).split(" ")
"""Decompositions of Unicode 16, which the unicodedata of older Pythons lacks."""
_CONTEXTS = [("a", "b"), (" ", " "), ("a ", " b"), ("\n", "\n"), ("<", ">"), ("é", "木")]

_WORDS = (
    "the The THE été naïve façade Straße ſtill ΑΒΓ λόγος Ложь Ёж ǅungla İstanbul ıslak 中文 漢字 "
    "かな カナ 한국어 ไทยคำ हिन्दी தமிழ் বাংলা ქართული ខ្មែរ ትግርኛ שָׁלוֹם مُحَمَّد فارسی اردو don't I'll "
    "camelCase snake_case x2 H2O Ⅷ ² ½ ① ㎞ ﬁ Å \u212b \u212a e\u0301 ▁ ▁▁ Ġ Ċ <0x0A> <0xFF> "
    "\x00 \x7f \ufffd"
).split(" ")
_CONTRACTIONS = "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'M 'lL 'D 'ſ ’s ’t '' ' 'x 's's".split()
_SPACES = [
    *" \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u200b\u2028\u2029\u202f\u205f\u3000\ufeff",
    *map(chr, range(0x2000, 0x200B)),
    *("\r\n", "  ", "    "),
]
_EMOJI = (
    "😀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 🇩 🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ ❤️ ❤ 🏳️‍🌈 \u200d \ufe0f 🫠 🪿 ☃ ™ © ∑ ≠ → █ ░ ─ € ₿ \U000e0061"
).split(" ")
_MARKS = [chr(point) for point in (*range(0x300, 0x370), 0x5B0, 0x5BC, 0x64B, 0x651, 0x93C, 0x20D0)]
_BIDI = "\u200e \u200f \u202a \u202b \u202c \u202d \u202e \u2066 \u2067 \u2069 שלום عربي 12 (a) ."
_CODE_POINT_SAMPLE = (*range(0x250), *range(0x250, 0xD800, 61), *range(0xE000, 0x20000, 251))
_TEXT_KINDS: tuple[tuple[Sequence[str], Sequence[str], int], ...] = (
    (_WORDS, ["", " ", " ", "  ", "\n", ", ", ".", "-"], 24),
    ([f(w) for w in _WORDS for f in (str.upper, str.title)], ["", "", " ", "_", "'s"], 24),
    (_WORDS, [*_CONTRACTIONS, *(f"{ending} " for ending in _CONTRACTIONS)], 24),
    ([*_SPACES, *_SPACES, "a", "1", ".", "木"], [""], 40),
    (
        ["", "x", "x;", "  y", "\tz", "}", "é", "1.", "😀"],
        ["\n", "\r\n", "\r", "\n\n", "\n\r", "\u2028", "\x85"],
        24,
    ),
    (string.digits, [*[""] * 16, *" ,.-ex\n"], 80),
    ("0123456789٠١٢٣٤५६७८９８７²³¹①②Ⅳ½¾〇一二", [*[""] * 8, *" ,.-ex\n"], 40),
    (_EMOJI, ["", "", " ", "a", "\u200d"], 24),
    ([*_MARKS, *"aEöשاक각 1\n" * 8], [""], 60),
    (_BIDI.split(" "), ["", " ", "\u0651", "\u05bc"], 24),
    (string.punctuation + " \n\t0aZ", [""], 200),
    (string.hexdigits, ["", " ", "\\x"], 300),
    (f"{string.ascii_letters}{string.digits}+/=", [""], 400),
    ([chr(point) for point in _CODE_POINT_SAMPLE], [""], 60),
    *(([*word], [""], 3000) for word in ("a", "ab", string.ascii_lowercase, "木林", "eé", "-_=")),
)
"""Parts, separators and the maximum number of parts of each kind of text."""


def wrap_code_point(code_point: int) -> str:
    """Return a code point in a context that reveals its class (letter, mark, number, space ...)."""
    character = chr(code_point)
    if code_point >> 16 in _UNASSIGNED_PLANES:
        return f"  {character}'s"
    return f"e{character}'s  {character}123\ne\u0301{character}\u0323"


def generate_compositions() -> Iterator[str]:
    """Yield the decompositions of all code points, which a tokenizer may compose again."""
    for character in map(chr, itertools.chain(*CODE_POINTS)):
        parts = unicodedata.normalize("NFD", character)
        if parts != character:
            yield f"a{parts}"
    for parts in _LATE_COMPOSITIONS:
        yield f"a{parts}"


def generate_token_spellings(tokens: Iterable[str]) -> Iterator[str]:
    """Yield strings that contain the spelling of tokens."""
    for token in tokens:
        yield from (token, token * 2, token[:-1], token[1:], token.upper())
        yield f"{token[:1]} {token[1:]}"
        for before, after in _CONTEXTS:
            yield f"{before}{token}{after}"


def read_embedded_texts() -> Iterator[str]:
    """Yield the starts of the embedded corpus's documents, if the corpus can be prepared."""
    try:
        files = sorted(embedded_corpus.prepare_embedded_corpus().glob("*.arrow"))
    except ConfigError:
        return
    for file in files:
        with pa.memory_map(str(file)) as mapped:
            for text in pa.ipc.open_file(mapped).read_all()["text"]:
                yield text.as_py()[:CHARACTERS_PER_DOCUMENT]


def generate_texts(texts_per_kind: int = TEXTS_PER_KIND) -> Iterator[str]:
    """Yield deterministic strings of every kind, and concatenations of several kinds."""
    rng = random.Random(0)
    for kind in _TEXT_KINDS:
        for _ in range(texts_per_kind):
            yield _generate_text(rng, *kind)
    for _ in range(texts_per_kind * len(_TEXT_KINDS)):
        kinds = rng.choices(_TEXT_KINDS, k=rng.randrange(2, 9))
        yield "".join(_generate_text(rng, *kind)[:40] for kind in kinds)


def _generate_text(
    rng: random.Random, parts: Sequence[str], separators: Sequence[str], max_parts: int
) -> str:
    count = rng.randrange(1, max_parts)
    pairs = zip(rng.choices(parts, k=count), rng.choices(separators, k=count), strict=True)
    return "".join(part + separator for part, separator in pairs)
