"""Export of a tokenizer to the files of Hugging Face transformers, with the ids of training.

A tokenizer.json may add tokens such as BOS, which transformers would add to every prompt. Training
does not add them, so the exported file does not either.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hlat.data.tokenizer import parse_tokenizer


def find_tokenizer_file(sha256: str, candidates: Iterable[Path]) -> Path | None:
    """Return the first file with this sha256, or None."""
    for path in candidates:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return path
    return None


def build_tokenizer_files(path: Path, eos_token: str, sequence_length: int) -> dict[str, bytes]:
    """Return the tokenizer.json and tokenizer_config.json of an exported model.

    The tokenizer.json of the run, `path`, is copied byte for byte if it adds no tokens.

    Raises:
        ConfigError: If the file is no tokenizer.
    """
    content = path.read_bytes()
    settings: dict[str, Any] = json.loads(content)
    removed = {"truncation", "padding"} & settings.keys()
    if parse_tokenizer(str(path), content).num_special_tokens_to_add(False):
        removed.add("post_processor")
    exported = settings | dict.fromkeys(sorted(removed))
    if exported != settings:
        content = json.dumps(exported, ensure_ascii=False).encode()
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": eos_token,
        # transformers 4 writes it to the tokenizer.json too, with default false
        "add_prefix_space": bool(pre_tokenizer.get("add_prefix_space", False)),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": sequence_length,
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }
