"""Conversion of text to token ids with a tokenizer.json.

The file is read by the library `tokenizers` only, so no code of a model hub runs, and its sha256
identifies the tokenizer. Special tokens in the text of a document are encoded as ordinary text, so
a web page cannot end a document.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.data import DataConfig, EncoderLibrary
from hlat.data import encoder_parity, tokenizer_probe, tokenizer_round_trip
from hlat.data.document_chunks import build_document_chunker
from hlat.data.source_bytes import SourceByteEncoder
from hlat.data.token_encoders import (
    FastEncoder,
    ReferenceEncoder,
    TokenEncoder,
    translate_errors,
)
from hlat.data.tokenizer_probe import MAX_TOKENIZER_BYTES
from hlat.data.tokenizer_round_trip import LostText
from hlat.storage.bounded_files import read_bounded

EMBEDDED = "embedded"
EMBEDDED_FILE = Path(__file__).with_name("embedded_tokenizer.json")
EMBEDDED_EOS_TOKEN = "<|endoftext|>"  # noqa: S105

_NO_TOKENS = np.empty(0, np.int32)


class Tokenizer:
    """A tokenizer with its EOS token and an optional BOS token."""

    def __init__(
        self,
        name: str,
        root: str,
        eos_token: str,
        encoder: EncoderLibrary = EncoderLibrary.reference,
        bos_token: str | None = None,
        max_lost_text: float = DataConfig.max_lost_text,
    ) -> None:
        """Load a tokenizer.json, relative to `root`, or the `embedded` one.

        A `max_lost_text` of 1 accepts every tokenizer, such as that of a trained model.

        Raises:
            ConfigError: If the file is missing or invalid, lacks the EOS or BOS token, encodes text
                to a special token, encodes at random, is not supported by the fast encoder, or
                loses more than the share `max_lost_text` of each of `encoder_parity.TEXTS`.
        """
        path = EMBEDDED_FILE
        if name != EMBEDDED:
            path = Path(root).expanduser() / Path(name).expanduser()
        try:
            content = read_bounded(path, MAX_TOKENIZER_BYTES)
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer={name}: cannot read {path} ({error.strerror}); set data.root, or "
                f"data.tokenizer to a tokenizer.json or to {EMBEDDED}"
            ) from error
        self._label = label = f"data.tokenizer={name}: {path}"
        self._backend_tokenizer = parse_tokenizer(label, content)
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self._backend_tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_token_id = self._find_token_id(path, "data.eos_token", eos_token)
        self.bos_token_id: int | None = None
        """Id of the token before each document; None: no token."""
        if bos_token is not None:
            self.bos_token_id = self._find_token_id(path, "data.bos_token", bos_token)
        self._prefix = [] if bos_token is None else [np.array([self.bos_token_id], np.int32)]
        self._suffix = [np.array([self.eos_token_id], np.int32)]
        self._name = name
        self._reference = ReferenceEncoder(self._backend_tokenizer, label)
        self._encoder: TokenEncoder = self._reference
        self._validate_special_tokens(name, path, eos_token, bos_token)
        self._validate_keeps_text(max_lost_text)
        if encoder is EncoderLibrary.fast:
            self._encoder = FastEncoder(name, content, self._reference)
            added = self._backend_tokenizer.get_added_tokens_decoder().values()
            spelled = [f"a{token.content} {token.content * 2}b" for token in added]
            self.validate_encoder([*encoder_parity.TEXTS, *spelled])
        self.chunker = build_document_chunker(self._backend_tokenizer)
        """Splits long documents without a change of their tokens."""
        self._byte_encoder = SourceByteEncoder(self._backend_tokenizer, self.chunker, label)

    @property
    def cache_key(self) -> str:
        """Key of all that determines the tokens of a document."""
        library = f"{type(self._encoder).__name__} tokenizers {tokenizers.__version__}"
        return f"{self.sha256} {self.bos_token_id} {self.eos_token_id} {library}"

    def validate_encoder(self, texts: Iterable[str]) -> None:
        """Raise ConfigError if the fast encoder does not give the reference's ids for the texts."""
        if self._encoder is not self._reference:
            encoder_parity.validate_same_ids(self._name, self._encoder, self._reference, texts)

    def measure_lost_text(self, documents: Sequence[str]) -> LostText:
        """Return the bytes of documents that are lost when they are encoded and decoded."""
        with translate_errors(self._label):
            return tokenizer_round_trip.measure_lost_text(self._backend_tokenizer, documents)

    def _find_token_id(self, path: Path, key: str, token: str) -> int:
        token_id = self._backend_tokenizer.token_to_id(token)
        if token_id is None:
            added = self._backend_tokenizer.get_added_tokens_decoder().values()
            special_tokens = [token.content for token in added if token.special]
            raise ConfigError(
                f"{key}={token} is not a token of {path}; its special tokens are: "
                f"{', '.join(special_tokens) or 'none'}"
            )
        return int(token_id)

    def _validate_special_tokens(
        self, name: str, path: Path, eos_token: str, bos_token: str | None
    ) -> None:
        """Raise ConfigError if encoding is random or encodes text to special tokens."""
        problems = []
        if dropout := getattr(self._backend_tokenizer.model, "dropout", None):
            problems.append(
                f"data.tokenizer={name}: {path} merges at random (dropout={dropout}), so that no "
                "run could be repeated; set dropout to null in its model"
            )
        delimiters = {eos_token: ("data.eos_token", self.eos_token_id, "end")}
        if bos_token is not None and self.bos_token_id is not None:
            delimiters.setdefault(bos_token, ("data.bos_token", self.bos_token_id, "start"))
        encodable = self._find_encodable_special_tokens(
            {token: token_id for token, (_, token_id, _) in delimiters.items()}
        )
        problems += [
            f"{key}={token}: a document that contains this text would get its id {token_id} and "
            f"seem to {boundary} there; choose a token that is special in the added_tokens of "
            f"{path} and no piece of its model"
            for token, (key, token_id, boundary) in delimiters.items()
            if token in encodable
        ]
        if others := [token for token in encodable if token not in delimiters]:
            problems.append(
                f"data.tokenizer={name}: documents that contain the text {', '.join(others)} would "
                f"get the ids of these control tokens; make them special in the added_tokens of "
                f"{path} and remove them from its model, or make them not special"
            )
        raise_config_errors(problems)

    def _validate_keeps_text(self, max_lost_text: float) -> None:
        """Raise ConfigError if each of `encoder_parity.TEXTS` loses more than `max_lost_text`."""
        for text in encoder_parity.TEXTS:
            if self.measure_lost_text([text]).share <= max_lost_text:
                return
        lost = self.measure_lost_text(encoder_parity.TEXTS)
        problem = tokenizer_round_trip.find_lost_text_problem(
            self._label, "the test texts", lost, max_lost_text
        )
        raise ConfigError(str(problem))

    def _find_encodable_special_tokens(self, delimiters: Mapping[str, int]) -> list[str]:
        """Return the special tokens, including `delimiters`, that result from encoding their text.

        The unknown token is exempt: any character outside the vocabulary is encoded as it.
        """
        added = self._backend_tokenizer.get_added_tokens_decoder().items()
        special_ids = {token.content: token_id for token_id, token in added if token.special}
        special_ids.pop(getattr(self._backend_tokenizer.model, "unk_token", None) or "", None)
        special_ids |= delimiters
        return [
            token
            for token, token_id in special_ids.items()
            if any(token_id in ids for ids in self._encoder.encode([token, f"a {token} b"]))
        ]

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids with BOS and EOS per document; empty if it has no token."""
        return [self.join_documents([ids])[0] for ids in self.encode_chunks(documents)]

    def encode_with_bytes(self, document: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the ids of `encode`, and the source bytes of each; BOS and EOS have none."""
        ids, num_bytes = self._byte_encoder.encode(document)
        if ids.size:
            ids, _ = self.join_documents([ids])
            num_bytes = np.pad(num_bytes, (self.bos_token_id is not None, 1))
        return ids, num_bytes

    def encode_chunks(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids without BOS and EOS per text."""
        return self._encoder.encode(documents)

    def join_documents(
        self, documents: Sequence[NDArray[np.int32]], is_first: bool = True, is_last: bool = True
    ) -> tuple[NDArray[np.int32], list[int]]:
        """Concatenate documents without BOS and EOS, or one chunk of a document.

        Args:
            documents: Token ids.
            is_first: Write BOS before each; False for a chunk that is not the first.
            is_last: Write EOS after each; False for a chunk that is not the last.

        Returns:
            The token ids, and the number of them before the end of each document. A complete
            document without tokens has no BOS and EOS.
        """
        prefix = self._prefix if is_first else []
        suffix = self._suffix if is_last else []
        num_delimiters, is_chunk = len(prefix) + len(suffix), not (is_first and is_last)
        parts, ends, size = [_NO_TOKENS], [], 0
        for ids in documents:
            if ids.size or is_chunk:
                parts += [*prefix, ids, *suffix]
                size += ids.size + num_delimiters
            ends.append(size)
        return np.concatenate(parts), ends

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self._backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def parse_tokenizer(label: str, content: bytes) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json; special tokens in the text are encoded as ordinary text.

    Raises:
        ConfigError: If the content is no tokenizer, has no token, or cannot encode text.
    """
    if content != EMBEDDED_FILE.read_bytes():
        tokenizer_probe.validate_tokenizer(label, content)
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
