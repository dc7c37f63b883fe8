"""Model for comparisons with lm-evaluation-harness, and comparison of items."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE

transformers = pytest.importorskip("transformers")


def write_random_model(
    path: Path, max_length: int, special_tokens: tuple[str, ...] = (), bos: str | None = None
) -> Path:
    """Write a random Llama and a tokenizer with more special tokens, which adds BOS if given."""
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_FILE))
    tokenizer.add_special_tokens([*special_tokens, *([bos] if bos else [])])
    names = {"eos_token": EMBEDDED_EOS_TOKEN}
    if bos:
        names["bos_token"] = bos
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model_config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.2,
        bos_token_id=tokenizer.token_to_id(bos) if bos else None,
        eos_token_id=tokenizer.token_to_id(EMBEDDED_EOS_TOKEN),
    )
    transformers.LlamaForCausalLM(model_config).save_pretrained(path)
    return path


def compare_values(value: Any, other: Any) -> None:
    """Compare strings exactly, and numbers, which may be strings, to 1e-5."""
    if isinstance(other, list):
        assert len(value) == len(other)
        for one, two in zip(value, other, strict=True):
            compare_values(one, two)
        return
    try:
        number = float(other)
    except (TypeError, ValueError):
        assert value == other
    else:
        assert float(value) == pytest.approx(number, rel=1e-5)
