"""Trains the tokenizer that hlat ships: `python -m hlat.data.train_tokenizer`.

A run that needs no download needs a tokenizer too, and where it came from should be a command and
not a story. It reads the embedded corpus, as many documents of each source, and none that are held
out, so that bits per byte on held-out text are honest.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from hlat.config.data import Data
from hlat.config.data import Source as SourceConfig
from hlat.config.errors import ConfigError, Exit
from hlat.data import library, tokenizer
from hlat.data.source import Source, open_sources

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before it merges bytes."""


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE that keeps every text unchanged.

    Args:
        texts: The documents to learn merges from.
        vocab_size: Tokens, the end-of-text token (id 0) and the 256 bytes included.
    """
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[tokenizer.EMBEDDED_EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    rust.train_from_iterator(texts, trainer)
    return rust


def balanced_texts(sources: Sequence[Source]) -> Iterator[str]:
    """As many training documents of each source as the smallest has."""
    count = min(source.num_training for source in sources)
    for source in sources:
        for position in tqdm(range(count), source.name, unit="document", disable=None):
            yield str(source.training_document(position), "utf-8", "replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write the file, and print the bytes per token on held-out documents."""
    parser = argparse.ArgumentParser(prog="hlat.data.train_tokenizer", description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument(
        "--output",
        type=Path,
        default=tokenizer.EMBEDDED_FILE,
        help="file to write (default: the one that hlat ships)",
    )
    arguments = parser.parse_args(argv)
    try:
        sources = _open_embedded()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    rust = train(balanced_texts(list(sources.values())), arguments.vocab_size)
    rust.save(str(arguments.output), pretty=False)
    print(f"wrote {arguments.output}: {rust.get_vocab_size()} tokens")
    for name, source in sources.items():
        texts = list(source.heldout_texts())
        tokens = sum(len(encoding.ids) for encoding in rust.encode_batch_fast(texts))
        num_bytes = sum(len(text.encode()) for text in texts)
        print(f"{name}: {num_bytes / tokens:.2f} bytes per token on held-out documents")
    return Exit.FINISHED


def _open_embedded() -> dict[str, Source]:
    configs = {name: SourceConfig(paths=[f"embedded:{name}"]) for name in library.NAMES}
    data = Data(
        name="embedded",
        sources=configs,
        tokenizer=tokenizer.EMBEDDED,
        eos_token=tokenizer.EMBEDDED_EOS,
    )
    return open_sources(data, seed=0)


if __name__ == "__main__":
    sys.exit(main())
