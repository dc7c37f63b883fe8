"""Text of token ids, of one token at a time or of those that continue a prompt.

A token can be a part of a character, and the text of a token can depend on the token before it.
Text is therefore decoded together with earlier tokens, from one complete character to the next, so
that the concatenated parts equal the text of the whole sequence.
"""

from collections.abc import Sequence
from typing import Protocol

_NUM_CONTEXT_TOKENS = 6
"""Tokens before the first new one that are decoded with it: the decoders of some tokenizers remove
the space before the first token."""
_MAX_CHARACTER_BYTES = 4
_INCOMPLETE_CHARACTER = "\ufffd"
"""Decoded text of some bytes of a character."""


class TextDecoder(Protocol):
    """Interface of tokenizers that decode token ids."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        ...


class TokenDecoder:
    """Text of each token of a sequence; an incomplete character is part of a later token's text."""

    def __init__(self, tokenizer: TextDecoder, context: Sequence[int] = ()) -> None:
        """Start after the tokens of `context`, which may end in the middle of a character."""
        self._tokenizer = tokenizer
        self._decoded: list[int] = []
        self._pending: list[int] = []
        self._decoded_text = ""
        for token in context[-self._count_context_tokens(context) :]:
            self.append(token)

    def append(self, token: int) -> str:
        """Return the text of a token, with the characters that it completes."""
        self._pending.append(token)
        text = self._decode_pending()
        return "" if text.endswith(_INCOMPLETE_CHARACTER) else self._take(text)

    def flush(self) -> str:
        """Return the text of the bytes that are no complete character."""
        return self._take(self._decode_pending())

    def _decode_pending(self) -> str:
        text = self._tokenizer.decode([*self._decoded, *self._pending])
        if text.startswith(self._decoded_text):
            return text[len(self._decoded_text) :]
        # A byte-fallback decoder replaces all bytes of an invalid run, also those of the context
        return self._tokenizer.decode(self._pending)

    def _take(self, text: str) -> str:
        if text:
            self._decoded, self._pending = self._pending, []
            self._decoded_text = self._tokenizer.decode(self._decoded)
        return text

    def _count_context_tokens(self, context: Sequence[int]) -> int:
        """Return the number of tokens from the start of a character to the end.

        Tokens at the end may be an incomplete character, with which a byte-fallback decoder
        replaces all bytes before it.
        """
        offsets = range(_MAX_CHARACTER_BYTES)
        for offset in offsets:
            tokens = context[-_NUM_CONTEXT_TOKENS - offset :]
            texts = (self._tokenizer.decode(list(tokens[: len(tokens) - cut])) for cut in offsets)
            if any(text and not text.startswith(_INCOMPLETE_CHARACTER) for text in texts):
                return _NUM_CONTEXT_TOKENS + offset
        return _NUM_CONTEXT_TOKENS


def decode_continuation(
    tokenizer: TextDecoder, prompt: Sequence[int], tokens: Sequence[int]
) -> str:
    """Return the text of tokens that continue a prompt."""
    decoder = TokenDecoder(tokenizer, prompt)
    return "".join([*map(decoder.append, tokens), decoder.flush()])
