"""Text to token ids by a tokenizer.json, and nothing but that file.

Only the Rust library reads it, so no code of a model hub ever runs, and its digest identifies it. A
control token spelled out in a document is ordinary text: a web page must not be able to end a
document.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.data.pieces import find_cuts

EMBEDDED = "embedded"
EMBEDDED_FILE = Path(__file__).with_name("embedded_tokenizer.json")
EMBEDDED_EOS = "<|endoftext|>"


class Tokenizer:
    """A tokenizer and the token that ends its documents."""

    def __init__(self, name: str, root: str, eos_token: str) -> None:
        """Load a tokenizer.

        Args:
            name: A tokenizer.json, relative to root, or `embedded`.
            root: Folder that relative paths start from.
            eos_token: Token written after each document.

        Raises:
            ConfigError: If the file is missing, is no tokenizer, or lacks the eos token.
        """
        path = EMBEDDED_FILE
        if name != EMBEDDED:
            path = Path(root).expanduser() / Path(name).expanduser()
        content = _read(name, path)
        self._rust = _parse(name, path, content)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        self.eos = self._find_eos(path, eos_token)
        self.cuts = find_cuts(self._rust)

    def _find_eos(self, path: Path, eos_token: str) -> int:
        added = self._rust.get_added_tokens_decoder().values()
        specials = [token.content for token in added if token.special]
        eos = self._rust.token_to_id(eos_token)
        if eos is None:
            raise ConfigError(
                f"data.eos_token={eos_token} is not a token of {path}; its special tokens are: "
                f"{', '.join(specials) or 'none'}"
            )
        return int(eos)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokenise documents, each with its eos; a document without text has no tokens and no eos.

        Returns:
            One array of token ids per text.
        """
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._with_eos(encoding.ids) for encoding in encodings]

    def encode_pieces(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokenise pieces of documents, without eos."""
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _with_eos(self, ids: list[int]) -> NDArray[np.int32]:
        if not ids:
            return np.empty(0, np.int32)
        ids.append(self.eos)
        return np.array(ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens spelled out."""
        return str(self._rust.decode(list(ids), skip_special_tokens=False))


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer={name}: cannot read {path} ({error.strerror}); set data.root, or "
            f"data.tokenizer to a tokenizer.json or to {EMBEDDED}"
        ) from error


def _parse(name: str, path: Path, content: bytes) -> tokenizers.Tokenizer:
    try:
        rust = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"data.tokenizer={name}: {path} is not a tokenizer.json that the tokenizers library "
            f"{tokenizers.__version__} reads ({error})"
        ) from error
    rust.encode_special_tokens = True
    rust.no_truncation()
    rust.no_padding()
    return rust
