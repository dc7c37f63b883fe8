"""Prompts and answers as a model reads and writes them: text to token ids and back.

A model that this platform trained saw no BOS, and read control tokens spelled out in a document as
ordinary text; so its prompts are. Of another model the folder says whether prompts begin with BOS.
"""

import json
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.data.tokenizer import Tokenizer, parse


class Prompts:
    """A tokenizer that knows how prompts begin.

    Attributes:
        eos: Id of the token that ends a document.
        eos_text: The same, spelled out.
        prefix: Id of the token before a text that has none before it: BOS if there is one, else
            EOS, after which training saw most documents begin.
        vocab_size: Ids that a text can have.
    """

    def __init__(self, file: Path, eos_token: str, bos_token: str | None, bos: bool | None) -> None:
        """Read a tokenizer.

        Args:
            file: The tokenizer.json.
            eos_token: Token that ends a document.
            bos_token: Token that begins one, if there is any.
            bos: Whether prompts begin with it; None: as tokenizer.json itself does it.

        Raises:
            ConfigError: It cannot be read, or lacks one of the tokens.
        """
        try:
            self._rust: Any = parse(str(file), file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        self.eos, self.eos_text = self._id(file, eos_token), eos_token
        self._bos = None if bos_token is None else self._id(file, bos_token)
        self.prefix = self.eos if self._bos is None else self._bos
        self._begins = bos

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """Token ids of a text; control tokens spelled out in it are ordinary text.

        Args:
            text: The text.
            begins: Whether it begins a prompt, and so with BOS where prompts do.
        """
        itself = begins and self._begins is None
        ids: list[int] = self._rust.encode(text, add_special_tokens=itself).ids
        first = [self._bos] if begins and self._begins and self._bos is not None else []
        return first + ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without control tokens."""
        return str(self._rust.decode(ids, skip_special_tokens=True))

    def _id(self, file: Path, token: str) -> int:
        found = self._rust.token_to_id(token)
        if found is None:
            raise ConfigError(f"{file} has no token {token!r}, with which its folder says to go on")
        return int(found)


def of_training(file: Path, eos_token: str) -> Prompts:
    """Those of a model that was trained here.

    Args:
        file: The tokenizer.json of the run.
        eos_token: What data.eos_token said.
    """
    Tokenizer(str(file), ".", eos_token)  # it refuses what no run would have trained with
    return Prompts(file, eos_token, None, False)


def of_folder(folder: Path) -> Prompts:
    """Those of a Hugging Face folder, as its tokenizer_config.json says.

    Raises:
        ConfigError: Its tokenizer cannot be read.
    """
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes())
        eos, bos = _text(config["eos_token"]), _text(config.get("bos_token"))
        if eos is None:
            raise KeyError("eos_token")
        adds = config.get("add_bos_token")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); evaluation needs tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} does not say which token ends a document ({error!r})") from error
    return Prompts(folder / "tokenizer.json", eos, bos, None if adds is None else bool(adds))


def _text(token: Any) -> str | None:
    """A token as tokenizer_config.json has it: a text, or an object that holds one."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
