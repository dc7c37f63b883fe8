"""Compare bits per byte with the bytes of decoded sequences and with source bytes.

The first is the definition of hlat before 2026-11-26, the second the current one. The loss is that
of the token frequencies of three quarters of the documents, so no model is trained.

    PYTHONPATH=. python benchmarks/evaluation/held_out_bytes.py NAME=FILE.mo ...
"""

import gettext
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from hlat.config.data import DataConfig
from hlat.data.heldout_sequences import pack_documents
from hlat.data.tokenizer import Tokenizer

LENGTHS = (16, 64, 256, 1024)
VOCAB_SIZE = 1500
EOS = "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def train_byte_level(texts: list[str]) -> tokenizers.Tokenizer:
    """Train a BPE model on bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_byte_fallback(texts: list[str]) -> tokenizers.Tokenizer:
    """Train a BPE model on characters with byte fallback and prepended space, as Llama 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, limit_alphabet=600, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    ids = {token: i for i, token in enumerate(["<unk>", *BYTES, *model["vocab"]])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def train_word_piece(texts: list[str]) -> tokenizers.Tokenizer:
    """Train a WordPiece model with the normalizer of BERT, which lowers and strips accents."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


TRAINERS = {
    "byte-level BPE": train_byte_level,
    "BPE, byte fallback": train_byte_fallback,
    "WordPiece": train_word_piece,
}


def compute_decoded_bits(
    tokenizer: Tokenizer, texts: list[str], nats: NDArray[np.float64], length: int
) -> float:
    """Return bits per byte of decoded sequences, without the incomplete last one."""
    packed = np.concatenate(tokenizer.encode(texts))
    rows = packed[: len(packed) // length * length].reshape(-1, length)[:, 1:]
    decoded = [tokenizer.decode(row[row != tokenizer.eos_token_id].tolist()) for row in rows]
    num_bytes = sum(len(text.encode()) for text in decoded)
    return float(nats[rows].sum() / math.log(2) / num_bytes)


def compute_source_bits(
    tokenizer: Tokenizer, texts: list[str], nats: NDArray[np.float64], length: int
) -> float:
    """Return bits per source byte."""
    data = DataConfig(name="text", sources={}, tokenizer="", eos_token=EOS)
    heldout = pack_documents(texts, tokenizer, None, length, data, "text", "")
    assert heldout.target_bytes.sum() == sum(len(text.encode()) for text in texts)
    total = heldout.sum_by_document(nats[heldout.sequences.tokens]).sum()
    return float(total / math.log(2) / heldout.target_bytes.sum())


def compare(name: str, texts: list[str], folder: Path) -> Iterator[str]:
    """Yield a row of the table for each tokenizer and length."""
    heldout, training = texts[::4], [text for i, text in enumerate(texts) if i % 4]
    for label, train in TRAINERS.items():
        backend = train(training)
        backend.add_special_tokens([EOS])
        backend.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer(str(folder / "tokenizer.json"), ".", EOS)
        ids = np.concatenate(tokenizer.encode(training))
        counts = np.bincount(ids, minlength=tokenizer.vocab_size) + 1.0
        nats = -np.log(counts / counts.sum())
        for length in LENGTHS:
            before, after = (
                compute(tokenizer, heldout, nats, length)
                for compute in (compute_decoded_bits, compute_source_bits)
            )
            change = f"{100 * (after / before - 1):+.2f}%"
            yield f"| {name} | {label} | {length} | {before:.4f} | {after:.4f} | {change} |"


def main() -> None:
    """Print a table for catalogs of gettext, given as NAME=FILE; a message is a document."""
    print("| text | tokenizer | length | decoded bytes | source bytes | change |")
    print("|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for argument in sys.argv[1:]:
            name, _, file = argument.partition("=")
            with open(file, "rb") as stream:
                catalog = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
            texts = [text for key, text in catalog.items() if key and isinstance(text, str)]
            print(*compare(name, texts, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
