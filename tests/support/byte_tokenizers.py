"""Tokenizers with bytes as tokens, for tests of texts with incomplete characters."""

import itertools

END, SPECIAL = 0, 1


class ByteTokenizer:
    """Tokenizer with bytes as ids; ids 0 and 1 are special tokens."""

    end_token_ids = frozenset({END})

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i > SPECIAL).decode(errors="replace")

    def find_special_token_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset({SPECIAL} if "<|special|>" in texts else ())


class ByteFallbackTokenizer(ByteTokenizer):
    """Tokenizer whose decoder replaces every byte of a run of bytes that is no text."""

    def decode(self, ids: list[int]) -> str:
        parts = []
        for is_ascii, run in itertools.groupby(ids, lambda i: i < 128):
            content = bytes(run)
            try:
                parts.append(content.decode())
            except UnicodeDecodeError:
                parts.append("\ufffd" * len(content))
            assert not is_ascii or parts[-1].isascii()
        return "".join(parts)
