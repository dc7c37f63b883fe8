"""Encoding of prompts and decoding of answers for evaluation.

A model trained by hlat reads BOS only if data.bos_token was set, and reads special tokens in a
document as ordinary text, so its prompts are encoded this way. The post-processor in the
tokenizer.json of another model defines its use of BOS, as in transformers 5.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.data import tokenizer_round_trip
from hlat.data.token_encoders import translate_errors
from hlat.data.tokenizer import Tokenizer, parse_tokenizer
from hlat.data.tokenizer_probe import MAX_TOKENIZER_BYTES
from hlat.data.tokenizer_round_trip import LostText
from hlat.storage.bounded_files import load_json, read_bounded


class PromptTokenizer:
    """A tokenizer with the BOS rule of its model."""

    def __init__(
        self, file: Path, eos_token: str, bos_token: str | None, add_bos_token: bool | None
    ) -> None:
        """Load a tokenizer.json; `add_bos_token` of None applies its post-processor to prompts.

        Raises:
            ConfigError: If the file is unreadable or lacks one of the tokens.
        """
        self.file, self._file = file, str(file)
        try:
            content = read_bounded(file, MAX_TOKENIZER_BYTES)
            self._tokenizer: Any = parse_tokenizer(self._file, content)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """Largest token id plus one."""
        self.eos_token_id, self.eos_token = self._get_token_id(file, eos_token), eos_token
        self._bos_token_id = None if bos_token is None else self._get_token_id(file, bos_token)
        bos_token_id = self._bos_token_id
        self.prefix_token_id = self.eos_token_id if bos_token_id is None else bos_token_id
        """Id before the first token of a text: BOS, or else EOS, which most documents follow."""
        self._add_bos_token = add_bos_token
        self.end_token_ids = frozenset({self.eos_token_id})
        """Ids that end a generated text; a model may have others besides EOS."""

    def encode(self, text: str, is_prompt_start: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS at a prompt start if the model uses it.

        Raises:
            ConfigError: If the tokenizer cannot encode the text.
        """
        add_special_tokens = is_prompt_start and self._add_bos_token is None
        with translate_errors(self._file):
            # Unlike `encode`, it releases the GIL, so that a server answers in the meantime
            [encoding] = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        if is_prompt_start and self._add_bos_token and self._bos_token_id is not None:
            return [self._bos_token_id, *ids]
        return ids

    def encode_with_special_tokens(self, text: str, is_prompt_start: bool = False) -> list[int]:
        """Return the token ids of a text in which names of special tokens stand for these tokens.

        At a prompt start, BOS is added if the model uses it and the text does not begin with it.

        Raises:
            ConfigError: If the tokenizer cannot encode the text.
        """
        if text.startswith(str(self._tokenizer.id_to_token(self.prefix_token_id))):
            is_prompt_start = False
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text, is_prompt_start)
        finally:
            self._tokenizer.encode_special_tokens = True

    def find_special_token_ids(self, names: Sequence[str]) -> frozenset[int]:
        """Return the ids of the special tokens with these names."""
        ids = self._special_token_ids
        return frozenset(ids[name] for name in names if name in ids)

    @cached_property
    def _special_token_ids(self) -> dict[str, int]:
        tokens = self._tokenizer.get_added_tokens_decoder()
        return {str(token): token_id for token_id, token in tokens.items() if token.special}

    @cached_property
    def max_token_characters(self) -> int:
        """Length of the longest token: a text has at least len(text) / this number of tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def added_bos_token(self) -> str | None:
        """Token that the model reads before each text; None: no token."""
        return self.find_added_bos_token()

    def find_added_bos_token(self) -> str | None:
        """Return the token that `encode` adds before a text at a prompt start; None: no token."""
        with_added, plain = self.encode("a"), self.encode("a", is_prompt_start=False)
        if len(with_added) == len(plain) or with_added[0] == plain[0]:
            return None
        return str(self._tokenizer.id_to_token(with_added[0]))

    def measure_lost_text(self, prompt: str) -> LostText:
        """Return the bytes of a prompt that are lost when it is encoded and decoded."""
        with translate_errors(self._file):
            return tokenizer_round_trip.measure_lost_text(self._tokenizer, [prompt])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _get_token_id(self, file: Path, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ConfigError(
                f"{file} has no token {token!r}, which its tokenizer_config.json sets"
            )
        return int(token_id)


def load_run_tokenizer(file: Path, eos_token: str, bos_token: str | None = None) -> PromptTokenizer:
    """Load the tokenizer of a model trained by hlat."""
    # Raises for a tokenizer that training rejects, except for lost text
    Tokenizer(str(file), ".", eos_token, bos_token=bos_token, max_lost_text=1.0)
    return PromptTokenizer(file, eos_token, bos_token, bos_token is not None)


def load_hugging_face_tokenizer(directory: Path) -> PromptTokenizer:
    """Load the tokenizer of a Hugging Face model directory.

    A warning is printed if its two files contradict each other about BOS.

    Raises:
        ConfigError: If its tokenizer is unreadable.
    """
    path = directory / "tokenizer_config.json"
    try:
        config = load_json(path)
        eos_token = get_token_content(config["eos_token"])
        bos_token = get_token_content(config.get("bos_token"))
        add_bos_token = config.get("add_bos_token")
        if eos_token is None:
            raise KeyError("eos_token")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); text needs tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} does not say which token ends a document ({error!r})") from error
    tokenizer = PromptTokenizer(directory / "tokenizer.json", eos_token, bos_token, None)
    adds_bos = tokenizer.find_added_bos_token() is not None
    if add_bos_token is not None and add_bos_token != adds_bos:
        rule = "a BOS" if adds_bos else "no BOS"
        print(
            f"WARNING: {path} has add_bos_token={str(add_bos_token).lower()}, and tokenizer.json "
            f"adds {rule}; prompts have {rule}, as in transformers 5",
            file=sys.stderr,
        )
    return tokenizer


def find_added_bos_token(directory: Path) -> str | None:
    """Return the token that a Hugging Face tokenizer adds before a text.

    None if it adds no token, or if the directory has no complete tokenizer.
    """
    try:
        return load_hugging_face_tokenizer(directory).find_added_bos_token()
    except ConfigError:
        return None


def get_token_content(token: Any) -> str | None:
    """Return a token of tokenizer_config.json, a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
