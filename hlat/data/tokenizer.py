"""Conversion of text to token ids with a tokenizer.json.

The file is read by the library `tokenizers` only, so no code of a model hub runs, and its sha256
identifies the tokenizer. Special tokens in the text of a document are encoded as ordinary text, so
a web page cannot end a document.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.config.data import EncoderLibrary
from hlat.data import encoder_parity
from hlat.data.document_chunks import build_document_chunker
from hlat.data.token_encoders import FastEncoder, ReferenceEncoder, TokenEncoder

EMBEDDED = "embedded"
EMBEDDED_FILE = Path(__file__).with_name("embedded_tokenizer.json")
EMBEDDED_EOS_TOKEN = "<|endoftext|>"  # noqa: S105


class Tokenizer:
    """A tokenizer and its EOS token."""

    def __init__(
        self,
        name: str,
        root: str,
        eos_token: str,
        encoder: EncoderLibrary = EncoderLibrary.reference,
    ) -> None:
        """Load a tokenizer.json, relative to `root`, or the `embedded` one.

        Raises:
            ConfigError: If the file is missing or invalid, lacks the EOS token, encodes text to a
                special token, encodes at random, or is not supported by the fast encoder.
        """
        path = EMBEDDED_FILE
        if name != EMBEDDED:
            path = Path(root).expanduser() / Path(name).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer={name}: cannot read {path} ({error.strerror}); set data.root, or "
                f"data.tokenizer to a tokenizer.json or to {EMBEDDED}"
            ) from error
        self._backend_tokenizer = parse_tokenizer(f"data.tokenizer={name}: {path}", content)
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self._backend_tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_token_id = self._find_eos_token_id(path, eos_token)
        self._name = name
        self._reference = ReferenceEncoder(self._backend_tokenizer)
        self._encoder: TokenEncoder = self._reference
        self._validate_special_tokens(name, path, eos_token)
        if encoder is EncoderLibrary.fast:
            self._encoder = FastEncoder(name, content, self._reference)
            added = self._backend_tokenizer.get_added_tokens_decoder().values()
            spelled = [f"a{token.content} {token.content * 2}b" for token in added]
            self.validate_encoder([*encoder_parity.TEXTS, *spelled])
        self.chunker = build_document_chunker(self._backend_tokenizer)
        """Splits long documents without a change of their tokens."""

    def validate_encoder(self, texts: Iterable[str]) -> None:
        """Raise ConfigError if the fast encoder does not give the reference's ids for the texts."""
        if self._encoder is not self._reference:
            encoder_parity.validate_same_ids(self._name, self._encoder, self._reference, texts)

    def _find_eos_token_id(self, path: Path, eos_token: str) -> int:
        eos_token_id = self._backend_tokenizer.token_to_id(eos_token)
        if eos_token_id is None:
            added = self._backend_tokenizer.get_added_tokens_decoder().values()
            special_tokens = [token.content for token in added if token.special]
            raise ConfigError(
                f"data.eos_token={eos_token} is not a token of {path}; its special tokens are: "
                f"{', '.join(special_tokens) or 'none'}"
            )
        return int(eos_token_id)

    def _validate_special_tokens(self, name: str, path: Path, eos_token: str) -> None:
        """Raise ConfigError if encoding is random or encodes text to special tokens."""
        problems = []
        if dropout := getattr(self._backend_tokenizer.model, "dropout", None):
            problems.append(
                f"data.tokenizer={name}: {path} merges at random (dropout={dropout}), so that no "
                "run could be repeated; set dropout to null in its model"
            )
        encodable = self._find_encodable_special_tokens(eos_token)
        if eos_token in encodable:
            problems.append(
                f"data.eos_token={eos_token}: a document that contains this text would get its id "
                f"{self.eos_token_id} and seem to end there; choose a token that is special in the "
                f"added_tokens of {path} and no piece of its model"
            )
        if others := [token for token in encodable if token != eos_token]:
            problems.append(
                f"data.tokenizer={name}: documents that contain the text {', '.join(others)} would "
                f"get the ids of these control tokens; make them special in the added_tokens of "
                f"{path} and remove them from its model, or make them not special"
            )
        if problems:
            raise ConfigError(*problems)

    def _find_encodable_special_tokens(self, eos_token: str) -> list[str]:
        """Return the special tokens that result from encoding their text.

        The unknown token is exempt: any character outside the vocabulary is encoded as it.
        """
        added = self._backend_tokenizer.get_added_tokens_decoder().items()
        special_ids = {token.content: token_id for token_id, token in added if token.special}
        special_ids.pop(getattr(self._backend_tokenizer.model, "unk_token", None) or "", None)
        special_ids[eos_token] = self.eos_token_id
        return [
            token
            for token, token_id in special_ids.items()
            if any(token_id in ids for ids in self._encoder.encode([token, f"a {token} b"]))
        ]

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids with EOS per document; empty for an empty document."""
        return [self.append_eos(ids) if ids.size else ids for ids in self.encode_chunks(documents)]

    def encode_chunks(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids without EOS per text."""
        return self._encoder.encode(documents)

    def append_eos(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return token ids followed by EOS."""
        tokens = np.empty(ids.size + 1, np.int32)  # a third of the time of np.append
        tokens[:-1] = ids
        tokens[-1] = self.eos_token_id
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self._backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def parse_tokenizer(label: str, content: bytes) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json; special tokens in the text are encoded as ordinary text.

    Raises:
        ConfigError: If the content is no tokenizer.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(
            f"{label} is not a tokenizer.json that the tokenizers library "
            f"{tokenizers.__version__} reads ({error})"
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
