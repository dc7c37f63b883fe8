"""Texts on which two encoders are most likely to differ.

Libraries that read the same tokenizer.json differ on unusual text: code points of newer Unicode
versions, runs of white space, digits, composing marks, long words. Ordinary text would not reveal
the difference, and a single such document changes a run.
"""

import base64
import itertools
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from hlat.config.config_errors import ConfigError
from hlat.data import embedded_corpus, standard_library

CODE_POINTS = (range(0xD800), range(0xE000, sys.maxunicode + 1))
"""All code points except surrogates."""
CHARACTERS_PER_DOCUMENT = 4096
"""Characters to compare of each document of the embedded corpus."""
TEXTS_PER_GENERATOR = 150

_UNASSIGNED_PLANES = frozenset({*range(4, 14), 15, 16})
"""Unicode planes that contain only private use."""
_LATE_COMPOSITIONS = [
    *("\U000105d2\u0307", "\U000105da\u0307", "\U00011382\U000113c9", "\U00011384\U000113bb"),
    *("\U0001138b\U000113c2", "\U00011390\U000113c9", "\U000113c2\U000113c2"),
    *("\U000113c2\U000113b8", "\U000113c2\U000113c9", "\U0001611e\U0001611e"),
    *("\U0001611e\U00016129", "\U0001611e\U0001611f", "\U00016129\U0001611f"),
    *("\U0001611e\U00016120", "\U0001611e\U0001611e\U0001611f", "\U0001611e\U00016129\U0001611f"),
    *("\U0001611e\U0001611e\U00016120", "\U00016d67\U00016d67", "\U00016d63\U00016d67"),
    "\U00016d63\U00016d67\U00016d67",
]
"""Decompositions of Unicode 16, which the unicodedata of older Pythons lacks."""

_SPACES = [
    *" \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u200b\u2028\u2029\u202f\u205f\u3000\ufeff",
    *map(chr, range(0x2000, 0x200B)),
    "\r\n",
    "  ",
    "    ",
]
_SAMPLE_WORDS = (
    "the The THE été naïve façade Straße ſtill ΑΒΓ λόγος Ложь Ёж ǅungla İstanbul ıslak 中文 漢字 "
    "かな カナ 한국어 ไทยคำ हिन्दी தமிழ் বাংলা ქართული ខ្មែរ ትግርኛ שָׁלוֹם مُحَمَّد فارسی اردو don't I'll "
    "camelCase snake_case x2 H2O Ⅷ ² ½ ① ㎞ ﬁ Å \u212b \u212a e\u0301 ▁ ▁▁ Ġ Ċ <0x0A> <0xFF> "
    "\x00 \x7f \ufffd"
).split(" ")
_CONTRACTIONS = "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'M 'lL 'D 'ſ ’s ’t '' ' 'x 's's".split()
_DIGITS = "0123456789٠١٢٣٤५६७८９８７²³¹①②Ⅳ½¾〇一二"
_EMOJI = (
    "😀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 🇩 🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ ❤️ ❤ 🏳️‍🌈 \u200d \ufe0f 🫠 🪿 ☃ ™ © ∑ ≠ → █ ░ ─ € ₿ \U000e0061"
).split(" ")
_MARKS = [chr(point) for point in (*range(0x300, 0x370), 0x5B0, 0x5BC, 0x64B, 0x651, 0x93C, 0x20D0)]
_BIDI = [
    *"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2069",
    "שלום",
    "عربي",
    "12",
    "(a)",
    ".",
]
_CONTEXTS = [("a", "b"), (" ", " "), ("a ", " b"), ("\n", "\n"), ("<", ">"), ("é", "木")]
_SYMBOLS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \n\t0aZ"
_LINES = ["", "x", "x;", "  y", "\tz", "}", "é", "1.", "😀"]
_LINE_ENDS = ["\n", "\r\n", "\r", "\n\n", "\n\r", "\u2028", "\x85"]
_ALPHABETS = ["a", "ab", "abcdefghijklmnopqrstuvwxyz", "木林", "eé", "=", "-_", "ＡＢ"]


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
    """Yield texts that contain the spelling of tokens."""
    for token in tokens:
        yield from (token, token * 2, token[:-1], token[1:], token.upper())
        yield f"{token[:1]} {token[1:]}"
        for before, after in _CONTEXTS:
            yield f"{before}{token}{after}"


def read_embedded_texts() -> Iterator[str]:
    """Yield the starts of the embedded corpus's documents, if the corpus can be prepared."""
    try:
        files = [
            embedded_corpus.get_embedded_source_file("data.encoder", name)
            for name in standard_library.SOURCE_NAMES
        ]
    except ConfigError:
        return
    for file in files:
        with pa.memory_map(str(file)) as mapped:
            for text in pa.ipc.open_file(mapped).read_all()["text"]:
                yield text.as_py()[:CHARACTERS_PER_DOCUMENT]


def generate_texts(texts_per_generator: int = TEXTS_PER_GENERATOR) -> Iterator[str]:
    """Yield deterministic texts of every generator, and concatenations of several generators."""
    for seed, generate in _GENERATORS.items():
        rng = random.Random(seed)
        for _ in range(texts_per_generator):
            yield generate(rng)
    rng = random.Random("mixed")
    generators = list(_GENERATORS.values())
    for _ in range(texts_per_generator * len(generators)):
        selected = rng.choices(generators, k=rng.randrange(2, 9))
        yield "".join(generate(rng)[:40] for generate in selected)


def _join_random(
    rng: random.Random, parts: list[str], separators: list[str], max_parts: int = 24
) -> str:
    count = rng.randrange(1, max_parts)
    return "".join(rng.choice(parts) + rng.choice(separators) for _ in range(count))


def _generate_numbers(rng: random.Random) -> str:
    runs = ["".join(rng.choices(_DIGITS[:10], k=rng.randrange(1, 20))) for _ in range(5)]
    mixed = ["".join(rng.choices(_DIGITS, k=rng.randrange(1, 9))) for _ in range(5)]
    return _join_random(rng, runs + mixed, ["", " ", ",", ".", "-", "e", "x", "\n"])


def _generate_combining(rng: random.Random) -> str:
    marks = ["".join(rng.choices(_MARKS, k=rng.randrange(1, 5))) for _ in range(8)]
    return _join_random(rng, ["a", "E", "ö", "ש", "ا", "क", "각", " ", "1", "\n"], marks)


def _generate_long_words(rng: random.Random) -> str:
    length = rng.randrange(20, 3000)
    return "".join(rng.choices(rng.choice(_ALPHABETS), k=length))


def _generate_encoded(rng: random.Random) -> str:
    data = rng.randbytes(rng.randrange(1, 300))
    return rng.choice([base64.b64encode(data).decode(), data.hex(), data.hex(" "), repr(data)])


def _generate_case(rng: random.Random) -> str:
    changes = [str.upper, str.lower, str.title, str.swapcase]
    words = [rng.choice(changes)(word) for word in _SAMPLE_WORDS]
    return _join_random(rng, words, ["", "", " ", "_", "'s"])


def _generate_any_code_points(rng: random.Random) -> str:
    limits = [0x80, 0x250, 0x3000, 0xD800, 0x20000, sys.maxunicode + 1]
    points = [rng.randrange(rng.choice(limits)) for _ in range(rng.randrange(1, 60))]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


_GENERATORS: dict[str, Callable[[random.Random], str]] = {
    "_words": lambda rng: _join_random(
        rng, _SAMPLE_WORDS, ["", " ", " ", "  ", "\n", ", ", ".", "-"]
    ),
    "_white_space": lambda rng: _join_random(
        rng, [*_SPACES, *_SPACES, "a", "1", ".", "木"], [""], max_parts=40
    ),
    "_newlines": lambda rng: _join_random(rng, _LINES, _LINE_ENDS),
    "_numbers": _generate_numbers,
    "_contractions": lambda rng: _join_random(
        rng, _SAMPLE_WORDS, [ending + space for ending in _CONTRACTIONS for space in ("", " ")]
    ),
    "_emoji": lambda rng: _join_random(rng, _EMOJI, ["", "", " ", "a", "\u200d"]),
    "_combining": _generate_combining,
    "_right_to_left": lambda rng: _join_random(rng, _BIDI, ["", " ", "\u0651", "\u05bc"]),
    "_long_words": _generate_long_words,
    "_encoded": _generate_encoded,
    "_source_code": lambda rng: "".join(rng.choices(_SYMBOLS, k=rng.randrange(1, 200))),
    "_case": _generate_case,
    "_any_code_points": _generate_any_code_points,
}
"""Generators by the seed of their texts; another seed changes the compared texts."""
