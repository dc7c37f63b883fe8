"""Texts on which two encoders would differ if they ever do.

Libraries that read the same tokenizer.json part company where text is unusual: code points that a
newer Unicode knows, runs of white space, digits, marks that compose, words without end. Ordinary
text alone would not show it, and one such document in a corpus is enough to make another run.
"""

import base64
import itertools
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from hlat.config.errors import ConfigError
from hlat.data import embedded, library

CODE_POINTS = (range(0xD800), range(0xE000, sys.maxunicode + 1))
"""Everything a text can hold: all but surrogates."""
CHARACTERS_PER_DOCUMENT = 4096
"""How much of each document of the embedded corpus is compared."""
TEXTS_PER_KIND = 150

_UNASSIGNED_PLANES = frozenset({*range(4, 14), 15, 16})
"""Blocks of 65,536 code points in which Unicode has placed nothing but private use."""
_LATE_COMPOSITIONS = [
    *("\U000105d2\u0307", "\U000105da\u0307", "\U00011382\U000113c9", "\U00011384\U000113bb"),
    *("\U0001138b\U000113c2", "\U00011390\U000113c9", "\U000113c2\U000113c2"),
    *("\U000113c2\U000113b8", "\U000113c2\U000113c9", "\U0001611e\U0001611e"),
    *("\U0001611e\U00016129", "\U0001611e\U0001611f", "\U00016129\U0001611f"),
    *("\U0001611e\U00016120", "\U0001611e\U0001611e\U0001611f", "\U0001611e\U00016129\U0001611f"),
    *("\U0001611e\U0001611e\U00016120", "\U00016d67\U00016d67", "\U00016d63\U00016d67"),
    "\U00016d63\U00016d67\U00016d67",
]
"""Those of Unicode 16, in parts, which the unicodedata of older Pythons does not know."""

_SPACES = [
    *" \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u200b\u2028\u2029\u202f\u205f\u3000\ufeff",
    *map(chr, range(0x2000, 0x200B)),
    "\r\n",
    "  ",
    "    ",
]
_WORDS = (
    "the The THE été naïve façade Straße ſtill ΑΒΓ λόγος Ложь Ёж ǅungla İstanbul ıslak 中文 漢字 "
    "かな カナ 한국어 ไทยคำ हिन्दी தமிழ் বাংলা ქართული ខ្មែរ ትግርኛ שָׁלוֹם مُحَمَّد فارسی اردو don't I'll "
    "camelCase snake_case x2 H2O Ⅷ ² ½ ① ㎞ ﬁ Å \u212b \u212a e\u0301 ▁ ▁▁ Ġ Ċ <0x0A> <0xFF> "
    "\x00 \x7f \ufffd"
).split(" ")
_ENDINGS = "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'M 'lL 'D 'ſ ’s ’t '' ' 'x 's's".split()
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
_SURROUNDINGS = [("a", "b"), (" ", " "), ("a ", " b"), ("\n", "\n"), ("<", ">"), ("é", "木")]
_SYMBOLS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \n\t0aZ"


def in_context(code_point: int) -> str:
    """A code point where it shows whether it is a letter, mark, number, space or anything else."""
    character = chr(code_point)
    if code_point >> 16 in _UNASSIGNED_PLANES:
        return f"  {character}'s"
    return f"e{character}'s  {character}123\ne\u0301{character}\u0323"


def compositions() -> Iterator[str]:
    """What Unicode writes as one code point, in parts: a tokenizer may put it together again."""
    for character in map(chr, itertools.chain(*CODE_POINTS)):
        parts = unicodedata.normalize("NFD", character)
        if parts != character:
            yield f"a{parts}"
    for parts in _LATE_COMPOSITIONS:
        yield f"a{parts}"


def written_tokens(tokens: Iterable[str]) -> Iterator[str]:
    """Texts in which somebody spells out the tokens of a tokenizer."""
    for token in tokens:
        yield from (token, token * 2, token[:-1], token[1:], token.upper())
        yield f"{token[:1]} {token[1:]}"
        for before, after in _SURROUNDINGS:
            yield f"{before}{token}{after}"


def real_texts() -> Iterator[str]:
    """The beginnings of the embedded corpus' documents; none where it cannot be prepared."""
    try:
        files = [embedded.source_file("data.encoder", name) for name in library.NAMES]
    except ConfigError:
        return
    for file in files:
        with pa.memory_map(str(file)) as mapped:
            for text in pa.ipc.open_file(mapped).read_all()["text"]:
                yield text.as_py()[:CHARACTERS_PER_DOCUMENT]


def generated_texts(per_kind: int = TEXTS_PER_KIND) -> Iterator[str]:
    """Texts of every unusual kind, and texts that mix the kinds; the same at every call."""
    for kind in _KINDS:
        dice = random.Random(kind.__name__)
        for _ in range(per_kind):
            yield kind(dice)
    dice = random.Random("mixed")
    for _ in range(per_kind * len(_KINDS)):
        yield "".join(kind(dice)[:40] for kind in dice.choices(_KINDS, k=dice.randrange(2, 9)))


def _join(dice: random.Random, parts: list[str], separators: list[str], most: int = 24) -> str:
    count = dice.randrange(1, most)
    return "".join(dice.choice(parts) + dice.choice(separators) for _ in range(count))


def _words(dice: random.Random) -> str:
    return _join(dice, _WORDS, ["", " ", " ", "  ", "\n", ", ", ".", "-"])


def _white_space(dice: random.Random) -> str:
    return _join(dice, [*_SPACES, *_SPACES, "a", "1", ".", "木"], [""], most=40)


def _newlines(dice: random.Random) -> str:
    lines = ["", "x", "x;", "  y", "\tz", "}", "é", "1.", "😀"]
    return _join(dice, lines, ["\n", "\r\n", "\r", "\n\n", "\n\r", "\u2028", "\x85"])


def _numbers(dice: random.Random) -> str:
    runs = ["".join(dice.choices(_DIGITS[:10], k=dice.randrange(1, 20))) for _ in range(5)]
    mixed = ["".join(dice.choices(_DIGITS, k=dice.randrange(1, 9))) for _ in range(5)]
    return _join(dice, runs + mixed, ["", " ", ",", ".", "-", "e", "x", "\n"])


def _contractions(dice: random.Random) -> str:
    return _join(dice, _WORDS, [ending + space for ending in _ENDINGS for space in ("", " ")])


def _emoji(dice: random.Random) -> str:
    return _join(dice, _EMOJI, ["", "", " ", "a", "\u200d"])


def _combining(dice: random.Random) -> str:
    marks = ["".join(dice.choices(_MARKS, k=dice.randrange(1, 5))) for _ in range(8)]
    return _join(dice, ["a", "E", "ö", "ש", "ا", "क", "각", " ", "1", "\n"], marks)


def _right_to_left(dice: random.Random) -> str:
    return _join(dice, _BIDI, ["", " ", "\u0651", "\u05bc"])


def _long_words(dice: random.Random) -> str:
    length = dice.randrange(20, 3000)
    letters = dice.choice(
        ["a", "ab", "abcdefghijklmnopqrstuvwxyz", "木林", "eé", "=", "-_", "ＡＢ"]
    )
    return "".join(dice.choices(letters, k=length))


def _encoded(dice: random.Random) -> str:
    data = dice.randbytes(dice.randrange(1, 300))
    return dice.choice([base64.b64encode(data).decode(), data.hex(), data.hex(" "), repr(data)])


def _source_code(dice: random.Random) -> str:
    return "".join(dice.choices(_SYMBOLS, k=dice.randrange(1, 200)))


def _case(dice: random.Random) -> str:
    words = [dice.choice([str.upper, str.lower, str.title, str.swapcase])(word) for word in _WORDS]
    return _join(dice, words, ["", "", " ", "_", "'s"])


def _any_code_points(dice: random.Random) -> str:
    limits = [0x80, 0x250, 0x3000, 0xD800, 0x20000, sys.maxunicode + 1]
    points = [dice.randrange(dice.choice(limits)) for _ in range(dice.randrange(1, 60))]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


_KINDS: list[Callable[[random.Random], str]] = [
    _words,
    _white_space,
    _newlines,
    _numbers,
    _contractions,
    _emoji,
    _combining,
    _right_to_left,
    _long_words,
    _encoded,
    _source_code,
    _case,
    _any_code_points,
]
