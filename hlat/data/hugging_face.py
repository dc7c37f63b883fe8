"""A tokenizer as Hugging Face's libraries load it, with the ids that training read.

A tokenizer.json may add tokens by itself, a BOS most often, and transformers then adds them to
every prompt. Training never did, so the written file does not.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hlat.data.tokenizer import parse


def find(sha256: str, places: Iterable[Path]) -> Path | None:
    """The first of some files that is the tokenizer with this sha256; None: none of them is."""
    for path in places:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return path
    return None


def documents(path: Path, eos_token: str, sequence_length: int) -> dict[str, bytes]:
    """The files tokenizer.json and tokenizer_config.json of an exported model.

    Args:
        path: The tokenizer.json of the run; where it adds nothing it is copied byte for byte.
        eos_token: Token that ends a document.
        sequence_length: Tokens per sequence in training.

    Raises:
        ConfigError: The file is no tokenizer.
    """
    content = path.read_bytes()
    settings: dict[str, Any] = json.loads(content)
    plain = _without_additions(settings, parse(str(path), content).num_special_tokens_to_add(False))
    if plain != settings:
        content = json.dumps(plain, ensure_ascii=False).encode()
    splitting = settings.get("pre_tokenizer") or {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": eos_token,
        # transformers 4 sets it in the tokenizer.json too, to false unless told
        "add_prefix_space": bool(splitting.get("add_prefix_space", False)),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": sequence_length,
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def _without_additions(settings: dict[str, Any], num_added: int) -> dict[str, Any]:
    """The settings of a tokenizer that neither adds tokens nor cuts or fills texts."""
    plain = settings | {key: None for key in ("truncation", "padding") if key in settings}
    return plain | {"post_processor": None} if num_added else plain
