"""Generated text that grows token by token, up to a stop string or an end token."""

from collections.abc import Sequence

from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.data.token_decoder import TokenDecoder


class TextStream:
    """Generated text, up to the first stop string or end token.

    A stop string can be the name of a special token.

    Attributes:
        text: Text so far, without bytes of an incomplete character and a possible beginning of a
            stop string at its end.
        is_finished: True after a stop string or end token.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._decoder = TokenDecoder(tokenizer, prompt)
        self._end_token_ids = tokenizer.end_token_ids | tokenizer.find_special_token_ids(stop)
        self._stop = stop
        self.text, self.is_finished, self._decoded = "", False, ""

    def append(self, token: int) -> str:
        """Return the new part of the text after a token."""
        if token in self._end_token_ids:
            self.is_finished = True
            return self.flush()
        return self._append_text(self._decoder.append(token))

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        new = self._append_text(self._decoder.flush())
        return new + self._extend(len(self._decoded))

    def _append_text(self, text: str) -> str:
        self._decoded += text
        positions = [self._decoded.find(stop, len(self.text)) for stop in self._stop]
        if found := [position for position in positions if position >= 0]:
            self.is_finished, self._decoded = True, self._decoded[: min(found)]
            return self._extend(len(self._decoded))
        return self._extend(len(self._decoded) - self._count_stop_characters())

    def _extend(self, end: int) -> str:
        new = self._decoded[len(self.text) : end]
        self.text += new
        return new

    def _count_stop_characters(self) -> int:
        """Return the number of characters at the end that may begin a stop string."""
        pending = self._decoded[len(self.text) :]
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(pending)), 0, -1)
        return next(
            (size for size in sizes if any(s.startswith(pending[-size:]) for s in self._stop)), 0
        )
