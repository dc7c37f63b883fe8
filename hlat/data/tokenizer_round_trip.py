"""Share of texts that encoding and decoding loses.

A tokenizer loses a character if it has no token for it, drops it, or changes it in its normalizer.
A model trained on such tokens cannot write the character, and its loss per byte is too low.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import tokenizers

from hlat.data.encoder_parity import shorten_text

NUM_SAMPLED_DOCUMENTS, MAX_SAMPLED_CHARACTERS = 16, 4096
"""Number of documents of a sample, and the characters of each from its start."""


@dataclass(frozen=True)
class LostText:
    """UTF-8 bytes of texts, the bytes that are lost, and an example.

    A byte is lost if its character occurs less often in the decoded text. One space at the start of
    a text does not count, since SentencePiece-like tokenizers prepend one.
    """

    num_bytes: int
    num_lost: int = 0
    example: str = ""

    @property
    def share(self) -> float:
        """Fraction of the bytes that are lost."""
        return self.num_lost / max(1, self.num_bytes)

    def __str__(self) -> str:
        example = f"; for example {self.example}" if self.example else ""
        return f"{self.share:.2%} ({self.num_lost:,} of {self.num_bytes:,} bytes{example})"


def measure_lost_text(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> LostText:
    """Encode and decode texts, and return the bytes that are lost.

    Unknown tokens count as no text.
    """
    pairs = zip(texts, _convert(tokenizer, texts), strict=True)
    lost = [_count_lost_bytes(*pair) for pair in pairs]
    num_bytes, num_lost = sum(len(text.encode()) for text in texts), sum(lost)
    if not num_lost:
        return LostText(num_bytes)
    first = next(text for text, count in zip(texts, lost, strict=True) if count)
    piece = shorten_text(first, lambda parts: _find_lossy(tokenizer, parts))
    example = f"{piece!r} becomes {_convert(tokenizer, [piece])[0]!r}"
    return LostText(num_bytes, num_lost, example)


def merge_lost_text(parts: Sequence[LostText]) -> LostText:
    """Return the lost bytes of all parts, with the first example."""
    example = next((part.example for part in parts if part.example), "")
    num_bytes, num_lost = (part.num_bytes for part in parts), (part.num_lost for part in parts)
    return LostText(sum(num_bytes), sum(num_lost), example)


def sample_texts(documents: Iterable[str]) -> list[str]:
    """Return the start of the first documents."""
    return [text[:MAX_SAMPLED_CHARACTERS] for text in islice(documents, NUM_SAMPLED_DOCUMENTS)]


def find_lost_text_problem(
    tokenizer: str, text: str, lost: LostText, max_lost_text: float
) -> str | None:
    """Return an error message if the share of lost text is above `data.max_lost_text`, else None.

    `tokenizer` and `text` are names for the message.
    """
    if lost.share <= max_lost_text:
        return None
    return (
        f"{tokenizer} loses {lost} of {text}, more than data.max_lost_text={max_lost_text:g}; use "
        "a tokenizer with a token for every byte, as hlat tokenizer train makes, or if the loss is "
        f"intended (a normalizer), set data.max_lost_text={math.ceil(100 * lost.share) / 100:g}"
    )


def _find_lossy(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[str]:
    pairs = zip(texts, _convert(tokenizer, texts), strict=True)
    return [text for text, decoded in pairs if _count_lost_bytes(text, decoded)]


def _convert(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[str]:
    """Return the texts after encoding and decoding, without unknown tokens."""
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ids = [[one for one in encoding.ids if one != unknown] for encoding in encodings]
    return [str(text) for text in tokenizer.decode_batch(ids, skip_special_tokens=True)]


def _count_lost_bytes(text: str, decoded: str) -> int:
    if text == decoded:
        return 0
    lost = Counter(text.removeprefix(" ")) - Counter(decoded.removeprefix(" "))
    return sum(count * len(character.encode()) for character, count in lost.items())
