"""Train the tokenizers of the benchmark: `bytes`, like Llama 3's, and `pieces`, like Llama 2's."""

import json
from pathlib import Path
from typing import Any

import sentencepiece
from contestants import BOS, EOS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaTokenizerFast

NUM_TOKENS = 32_000
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bytes(folder: Path, documents: list[str]) -> None:
    """Train a byte-level BPE with the pattern of Llama 3."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    marks = [BOS["bytes"], EOS["bytes"]]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, "PreTrainedTokenizerFast", *marks)


def train_pieces(folder: Path, documents: list[str]) -> None:
    """Train a SentencePiece BPE with byte fallback and the options of Llama 2's model file."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in documents for line in text.splitlines()]),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=NUM_TOKENS,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.99995,
        num_threads=2,
        minloglevel=2,
    )
    fast = LlamaTokenizerFast(vocab_file=str(folder / "tokenizer.model"), legacy=False)
    fast.backend_tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(
        folder, "LlamaTokenizer", BOS["pieces"], EOS["pieces"], legacy=False, unk_token="<unk>"
    )


def _write_config(folder: Path, tokenizer_class: str, bos: str, eos: str, **more: Any) -> None:
    config = {"tokenizer_class": tokenizer_class, "bos_token": bos, "eos_token": eos, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
