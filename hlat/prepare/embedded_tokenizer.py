"""Training of the embedded tokenizer: `python -m hlat.prepare.embedded_tokenizer`.

It reads the same number of documents from each source of the embedded corpus, without held-out
documents, so bits per byte on held-out text are unbiased.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.data import DataConfig, SourceConfig
from hlat.data import embedded_corpus, tokenizer
from hlat.data.data_source import DataSource, open_data_sources

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization pattern of Llama 3."""


def train_bpe(
    documents: Iterator[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (tokenizer.EMBEDDED_EOS_TOKEN,),
) -> Tokenizer:
    """Train a lossless byte-level BPE.

    `vocab_size` includes the special tokens, which have the first ids, and the 256 bytes.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    bpe.train_from_iterator(documents, trainer)
    return bpe


def read_balanced_documents(sources: Sequence[DataSource]) -> Iterator[str]:
    """Yield as many training documents of each source as the smallest source has."""
    count = min(source.num_training_documents for source in sources)
    for source in sources:
        for position in tqdm(range(count), source.name, unit="document", disable=None):
            yield str(source.read_training_document(position), "utf-8", "replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Train and save the tokenizer, and print the bytes per token on held-out documents."""
    parser = argparse.ArgumentParser(prog="hlat.prepare.embedded_tokenizer", description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument(
        "--output",
        type=Path,
        default=tokenizer.EMBEDDED_FILE,
        help="file to write (default: the embedded tokenizer)",
    )
    arguments = parser.parse_args(argv)
    data = DataConfig(
        name="embedded",
        sources={
            name: SourceConfig(paths=[f"embedded:{name}"]) for name in embedded_corpus.SOURCE_NAMES
        },
        tokenizer=tokenizer.EMBEDDED,
        eos_token=tokenizer.EMBEDDED_EOS_TOKEN,
    )
    try:
        sources = open_data_sources(data, seed=0)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIGURATION
    bpe = train_bpe(read_balanced_documents(list(sources.values())), arguments.vocab_size)
    bpe.save(str(arguments.output), pretty=False)
    print(f"wrote {arguments.output}: {bpe.get_vocab_size()} tokens")
    for name, source in sources.items():
        texts = list(source.read_heldout_documents())
        tokens = sum(len(encoding.ids) for encoding in bpe.encode_batch_fast(texts))
        num_bytes = sum(len(text.encode()) for text in texts)
        print(f"{name}: {num_bytes / tokens:.2f} bytes per token on held-out documents")
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
