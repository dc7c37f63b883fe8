"""Comparison of the fast encoder with the reference on some texts, before a run uses it.

The tests compare all code points and thousands of texts for every supported kind of tokenizer. This
comparison detects a tokenizer of another kind.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.data.token_encoders import TokenEncoder

TEXTS = (
    "The quick brown fox's 3 cubs -- isn't it? I'LL we'Ve 's 'T -- jumped;\n\n    over.\r\n",
    "def f(x):\n\treturn x_1 ** 2  # H2O camelCase snake_case\n\n\n  \t\n \r\n\r\n   end   ",
    "0 12 123 1234 12345.67 1e-9 0x1F 2,000,000 ٣٤٥ ² ½ ① Ⅷ 一二",
    "été naïve e\u0301 Å \u212b ﬁ Straße ΑΒΓ Ёж \u01c5 İstanbul ",
    "木曜日は晴れ 한국어 ไทย हिन्दी שָׁלוֹם مُحَمَّد",
    "\x00\x1f\x7f \x85\xa0\u2028\u3000\ufeff\u200b a\u00a0b  \u2003c \ufffd ▁ ▁▁ Ġ Ċ <0x0A>",
    "😀 👩‍👩‍👧 👍🏽 🇩🇪 1️⃣ ❤️ ☃ € ∑≠→ !!! ## __ ''' \"\"\" ({[<...>]}) https://x.org/?q=1&r=%20",
    "aGVsbG8+d29ybGQ/Zm9v/YmFy==" * 8,
    "".join(map(chr, range(0x21, 0x250))),
)
"""Texts with the properties in which tokenizers differ: contractions, digits, white space, scripts,
combining marks, symbols, and words without spaces."""


def validate_same_ids(
    name: str, fast: TokenEncoder, reference: TokenEncoder, texts: Iterable[str]
) -> None:
    """Raise ConfigError if the encoders of `data.tokenizer={name}` differ on one of the texts."""
    for text in _find_differing_texts(fast, reference, list(texts)):
        raise ConfigError(
            f"data.encoder=fast does not give the ids of the reference for data.tokenizer={name}: "
            f"{_format_difference(text, fast, reference)}; set data.encoder=reference"
        )


def _find_differing_texts(
    fast: TokenEncoder, reference: TokenEncoder, texts: Sequence[str]
) -> list[str]:
    pairs = zip(texts, fast.encode(texts), reference.encode(texts), strict=True)
    return [text for text, ids, expected in pairs if not np.array_equal(ids, expected)]


def _format_difference(text: str, fast: TokenEncoder, reference: TokenEncoder) -> str:
    """Describe the difference in the ids of the shortest part of a text that has one."""
    text = shorten_text(text, lambda parts: _find_differing_texts(fast, reference, parts))
    (ids,), (expected,) = fast.encode([text]), reference.encode([text])
    shorter = min(len(ids), len(expected))
    first = next((i for i in range(shorter) if ids[i] != expected[i]), shorter)
    window = slice(max(0, first - 2), first + 6)
    return (
        f"it encodes {text!r} as {ids[window].tolist()} instead of {expected[window].tolist()} "
        f"(from token {window.start} on)"
    )


def shorten_text(text: str, select: Callable[[Sequence[str]], list[str]]) -> str:
    """Remove characters from both ends while `select` returns a part of the rest."""
    steps = (len(text) // 2, len(text) // 4, len(text) // 8, 1)
    parts = [part for step in steps if step for part in (text[step:], text[:-step])]
    selected = select(parts)
    return shorten_text(selected[0], select) if selected else text
