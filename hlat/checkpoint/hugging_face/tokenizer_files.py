"""Export of a tokenizer to the files of Hugging Face transformers, with the ids of training.

A tokenizer.json may add tokens such as BOS, which transformers would add to every prompt. The
exported file adds BOS if training does, and no other token.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.data.tokenizer import parse_tokenizer
from hlat.data.tokenizer_probe import MAX_TOKENIZER_BYTES
from hlat.storage.bounded_files import read_bounded

_CHAT_KEYS = (
    "chat_template",
    "bos_token",
    "pad_token",
    "unk_token",
    "additional_special_tokens",
    "extra_special_tokens",
)
"""Keys of tokenizer_config.json that a chat template depends on."""


def find_tokenizer_file(sha256: str, candidates: Iterable[Path]) -> Path | None:
    """Return the first file with this sha256, or None."""
    for path in candidates:
        with suppress(OSError):
            content = read_bounded(path, MAX_TOKENIZER_BYTES)
            if hashlib.sha256(content).hexdigest() == sha256:
                return path
    return None


def build_tokenizer_files(
    path: Path,
    eos_token: str,
    sequence_length: int,
    source_config: Mapping[str, Any] | None = None,
    bos_token: str | None = None,
) -> dict[str, bytes]:
    """Return the tokenizer.json and tokenizer_config.json of an exported model.

    The tokenizer.json of the run, `path`, is copied byte for byte if it adds the tokens of
    training: none, or `bos_token`. The chat template, and the special tokens that it may contain,
    are those of `source_config`, the tokenizer_config.json of the initial model.

    Raises:
        ConfigError: If the file cannot be read or is no tokenizer.
    """
    try:
        content = read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    tokenizer = parse_tokenizer(str(path), content)
    settings: dict[str, Any] = json.loads(content)
    exported = settings | dict.fromkeys(sorted({"truncation", "padding"} & settings.keys()))
    num_added = tokenizer.num_special_tokens_to_add(False)
    if bos_token is None:
        if num_added:
            exported["post_processor"] = None
    else:
        bos_token_id = tokenizer.token_to_id(bos_token)
        assert bos_token_id is not None, "Tokenizer validates data.bos_token"
        if num_added != 1 or tokenizer.encode("a").ids[0] != bos_token_id:
            exported["post_processor"] = _build_bos_processor(bos_token, bos_token_id)
    if exported != settings:
        content = json.dumps(exported, ensure_ascii=False).encode()
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos_token is not None,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": eos_token,
        # transformers 4 writes it to the tokenizer.json too, with default false
        "add_prefix_space": bool(pre_tokenizer.get("add_prefix_space", False)),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": sequence_length,
    }
    config |= {key: v for key, v in (source_config or {}).items() if key in _CHAT_KEYS}
    if bos_token is not None:
        config["bos_token"] = bos_token
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def _build_bos_processor(bos_token: str, bos_token_id: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that adds BOS before each text."""
    first, second = (
        [
            {"SpecialToken": {"id": bos_token, "type_id": type_id}},
            {"Sequence": {"id": text, "type_id": type_id}},
        ]
        for type_id, text in enumerate("AB")
    )
    token = {"id": bos_token, "ids": [bos_token_id], "tokens": [bos_token]}
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {bos_token: token},
    }
