"""Train a byte-level BPE tokenizer on text: `hlat tokenizer train`.

The result is a tokenizer.json, which `data.tokenizer` names, and the tokenizer_config.json of
Hugging Face transformers with its EOS and BOS.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    parse_positive_int,
    parse_size,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_EXAMPLES = """\
examples:
  hlat tokenizer train data/mine vocab_size=8192             output of hlat prepare
  hlat tokenizer train my/texts vocab_size=32000 output=tok  files that hlat prepare reads
  hlat tokenizer train data/mine vocab_size=8192 bos_token='<|begin|>'

The command prints the overrides of hlat train that use the tokenizer."""

_NUM_BYTES = 256
_UNLIMITED_LENGTH = int(1e30)
"""Value of transformers for a tokenizer without a maximum length."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the tokenizer; return the exit code."""
    parser = CommandLineParser(
        "tokenizer", "Train a lossless byte-level BPE tokenizer on text.", _EXAMPLES
    )
    add = parser.add_argument
    add("action", choices=("train",), help="what to do")
    inputs = "output of hlat prepare, or its inputs: files, directories, URLs, data sets"
    add("inputs", nargs="+", metavar="INPUT", help=inputs)
    size = "tokens, including the 256 bytes, EOS and BOS"
    add("--vocab-size", type=parse_positive_int, required=True, metavar="N", help=size)
    output = "directory to write (default: tokenizers/NAME-N)"
    add("--output", type=Path, metavar="DIR", help=output)
    eos = "token after each document (default: <|endoftext|>)"
    add("--eos-token", default="<|endoftext|>", metavar="TOKEN", help=eos)
    add("--bos-token", metavar="TOKEN", help="token before each document (default: none)")
    add("--text-column", default="text", metavar="NAME", help="field of the text (default: text)")
    sample = "text to train on; documents are sampled evenly (default: 1GB)"
    add("--sample", type=parse_size, default="1GB", metavar="SIZE", help=sample)
    arguments = parser.parse(argv)
    return run_command(lambda: _train(arguments), None)


def _train(arguments: argparse.Namespace) -> int:
    from hlat.checkpoint.hugging_face import tokenizer_files
    from hlat.data import tokenizer_round_trip
    from hlat.prepare import embedded_tokenizer as train_tokenizer
    from hlat.prepare import input_files, text_losses, train_command
    from hlat.prepare.text_sample import TextSample
    from hlat.storage import durable_files, output_directory
    from hlat.storage.progress_bar import print_line

    special_tokens = [*dict.fromkeys(filter(None, (arguments.eos_token, arguments.bos_token)))]
    if arguments.vocab_size < _NUM_BYTES + len(special_tokens):
        raise ConfigError(
            f"vocab_size={arguments.vocab_size} is less than {_NUM_BYTES} bytes and "
            f"{len(special_tokens)} special tokens; use {_NUM_BYTES + len(special_tokens)} or more"
        )
    inputs = [_find_training_part(location) for location in arguments.inputs]
    output = arguments.output or _choose_output(arguments.inputs[0], arguments.vocab_size)
    output_directory.validate_output_is_new(output)
    files = input_files.find_input_files(inputs)
    sample = TextSample(files, arguments.text_column, arguments.sample)
    bpe = train_tokenizer.train_bpe(iter(sample), arguments.vocab_size, special_tokens)
    remedy = "hlat prepare skip_damaged=true max_lost={}, and train on its output"
    text_losses.validate_losses(" ".join(inputs), sample.lost, sample.num_bytes_read, remedy=remedy)
    vocab_size = bpe.get_vocab_size()
    with output_directory.create_output_directory(output) as directory:
        path = directory / "tokenizer.json"
        bpe.save(str(path), pretty=False)
        contents = tokenizer_files.build_tokenizer_files(
            path, arguments.eos_token, _UNLIMITED_LENGTH, bos_token=arguments.bos_token
        )
        for name, content in contents.items():
            durable_files.replace_file(directory / name, content, durable=True)
        durable_files.rename_durably(directory, output)
    path = output.absolute() / "tokenizer.json"
    bpe.encode_special_tokens = True  # as ordinary text, as in training
    num_bytes, num_tokens = _count_tokens(bpe, sample.measured)
    print(f"{path}: {vocab_size:,} tokens")
    if vocab_size < arguments.vocab_size:
        print(f"the text has no more pairs to merge; vocab_size={arguments.vocab_size} is not used")
    for line in text_losses.format_losses(sample.lost, sample.num_bytes_read):
        print_line(line)
    print(f"{num_bytes / num_tokens:.2f} bytes per token in {len(sample.measured):,} documents")
    lost = tokenizer_round_trip.measure_lost_text(bpe, sample.measured)
    print(f"text that the tokenizer loses: {lost}")
    print(f"use it: {train_command.format_tokenizer_command(inputs, path)}")
    return ExitCode.FINISHED


def _count_tokens(bpe: "Tokenizer", documents: Sequence[str]) -> tuple[int, int]:
    encodings = bpe.encode_batch_fast(list(documents))
    num_tokens = sum(len(encoding.ids) for encoding in encodings)
    return sum(len(text.encode()) for text in documents), max(1, num_tokens)


def _find_training_part(location: str) -> str:
    """Return the training documents of a directory that hlat prepare divided, or the location."""
    from hlat.prepare import corpus_manifest
    from hlat.prepare.document_settings import HELDOUT, TRAIN

    parts = [Path(location) / name for name in (TRAIN, HELDOUT)]
    is_divided = all((part / corpus_manifest.MANIFEST_FILE).is_file() for part in parts)
    return str(parts[0]) if is_divided else location


def _choose_output(location: str, vocab_size: int) -> Path:
    name = re.sub(r"[^\w.-]+", "_", Path(location).expanduser().resolve().name)
    return Path("tokenizers") / f"{name or 'text'}-{vocab_size}"


if __name__ == "__main__":
    run_and_exit(main)
