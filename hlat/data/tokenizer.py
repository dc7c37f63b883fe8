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

from hlat.config.data import Encoder
from hlat.config.errors import ConfigError
from hlat.data import parity
from hlat.data.encoder import PieceEncoder, ReferenceEncoder
from hlat.data.pieces import find_cuts

EMBEDDED = "embedded"
EMBEDDED_FILE = Path(__file__).with_name("embedded_tokenizer.json")
EMBEDDED_EOS = "<|endoftext|>"


class Tokenizer:
    """A tokenizer and the token that ends its documents."""

    def __init__(
        self, name: str, root: str, eos_token: str, encoder: Encoder = Encoder.reference
    ) -> None:
        """Load a tokenizer.

        Args:
            name: A tokenizer.json, relative to root, or `embedded`.
            root: Folder that relative paths start from.
            eos_token: Token written after each document.
            encoder: Library that encodes; the fast one is compared with the reference before it is
                used with this tokenizer for the first time, which takes seconds.

        Raises:
            ConfigError: If the file is missing, is no tokenizer, lacks the eos token or lets text
                spell it, encodes at random, or is not for the fast encoder.
        """
        path = EMBEDDED_FILE
        if name != EMBEDDED:
            path = Path(root).expanduser() / Path(name).expanduser()
        content = _read(name, path)
        self._rust = parse(f"data.tokenizer={name}: {path}", content)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        self.eos = self._find_eos(path, eos_token)
        self._encoder: PieceEncoder = ReferenceEncoder(self._rust)
        self._refuse_unsafe(name, path, eos_token)
        if encoder is Encoder.fast:
            added = self._rust.get_added_tokens_decoder().values()
            written = [token.content for token in added]
            self._encoder = parity.admit(name, content, self._encoder, written)
        self.cuts = find_cuts(self._rust)
        """Where a long document may be cut into pieces."""

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

    def _refuse_unsafe(self, name: str, path: Path, eos_token: str) -> None:
        """Refuse a tokenizer that encodes at random, or gives control ids to text."""
        problems = []
        if dropout := getattr(self._rust.model, "dropout", None):
            problems.append(
                f"data.tokenizer={name}: {path} merges at random (dropout={dropout}), so that no "
                "run could be repeated; set dropout to null in its model"
            )
        spelled = self._find_spelled(eos_token)
        if eos_token in spelled:
            problems.append(
                f"data.eos_token={eos_token}: a document that contains this text would get its id "
                f"{self.eos} and seem to end there; choose a token that is special in the "
                f"added_tokens of {path} and no piece of its model"
            )
        if others := [token for token in spelled if token != eos_token]:
            problems.append(
                f"data.tokenizer={name}: documents that contain the text {', '.join(others)} would "
                f"get the ids of these control tokens; make them special in the added_tokens of "
                f"{path} and remove them from its model, or make them not special"
            )
        if problems:
            raise ConfigError(*problems)

    def _find_spelled(self, eos_token: str) -> list[str]:
        """Control tokens whose ids a document can get by containing their text.

        The id of unknown text is none of them: a document gets it by any letter that the
        vocabulary lacks.
        """
        added = self._rust.get_added_tokens_decoder().items()
        controls = {token.content: number for number, token in added if token.special}
        controls.pop(getattr(self._rust.model, "unk_token", None) or "", None)
        controls[eos_token] = self.eos
        return [
            token
            for token, number in controls.items()
            if any(number in ids for ids in self._encoder.encode([token, f"a {token} b"]))
        ]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokenise documents, each with its eos; a document without text has no tokens and no eos.

        Returns:
            One array of token ids per text.
        """
        return [self.end(ids) if ids.size else ids for ids in self._encoder.encode(texts)]

    def encode_pieces(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokenise texts that do not end a document, so that none gets an eos.

        Returns:
            One array of token ids per text.
        """
        return self._encoder.encode(texts)

    def end(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Token ids and eos."""
        ended = np.empty(ids.size + 1, np.int32)
        ended[:-1] = ids
        ended[-1] = self.eos
        return ended

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


def parse(named: str, content: bytes) -> tokenizers.Tokenizer:
    """Make a tokenizer of a tokenizer.json, to which control tokens in a document are text.

    Args:
        named: What named the file, and the file, for messages.
        content: What it holds.

    Raises:
        ConfigError: If it is none.
    """
    try:
        rust = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{named} is not a tokenizer.json that the tokenizers library "
            f"{tokenizers.__version__} reads ({error})"
        ) from error
    rust.encode_special_tokens = True
    rust.no_truncation()
    rust.no_padding()
    return rust
