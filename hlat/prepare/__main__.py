"""Convert corpora to training data, and inspect them: `hlat prepare`.

A run maps Arrow files and reads single rows; corpora are compressed JSON lines and Parquet. Without
arguments this command prepares the embedded corpus, for machines whose compute nodes have no
network.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hlat.config.argument_parser import CommandLineParser, parse_positive_int, run_and_exit
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.untrusted_files import format_value
from hlat.data import embedded_corpus
from hlat.data.arrow_dataset import ArrowDataset
from hlat.prepare import (
    corpus_inspection,
    corpus_layouts,
    corpus_manifest,
    input_files,
    preparation,
)
from hlat.storage.progress_bar import format_bytes, print_line

_EXAMPLES = """\
examples:
  hlat prepare                                           the embedded corpus
  hlat prepare texts/*.jsonl.zst output=data/mine        your own files
  hlat prepare s3://bucket/texts output=data/mine        a bucket (needs s3fs)
  hlat prepare RedPajama-Data-1T layout=redpajama output=data
  hlat prepare inspect=data                              counts, sizes, tokens and samples
  hlat prepare verify=data                               compare with the checksums

The same command continues after Ctrl-C, a kill or a full disk. See docs/data.md."""

_RESUME_HINT = "finished parts are kept; the same command continues"


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare, inspect or verify; return the exit code."""
    parser = _build_parser()
    arguments = parser.parse(argv)
    if problem := _find_usage_error(arguments):
        parser.error(problem)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIGURATION
    except KeyboardInterrupt:
        print(f"interrupted; {_RESUME_HINT}", file=sys.stderr)
        return ExitCode.PREEMPTED
    except OSError as error:
        path = arguments.output or error.filename
        reason = f"{path}: cannot be written ({error.strerror})" if error.errno else str(error)
        print(f"{reason}; {_RESUME_HINT}", file=sys.stderr)
        return ExitCode.FAILED


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "prepare",
        "Convert documents to the Arrow files that a run maps, or inspect them. Without\n"
        "arguments: prepare the embedded corpus, the source and documentation of Python's\n"
        "standard library, in $HLAT_CACHE, $XDG_CACHE_HOME/hlat or ~/.cache/hlat.",
        _EXAMPLES,
    )
    add = parser.add_argument
    suffixes = f"files, directories, URLs: {input_files.SUPPORTED_SUFFIXES}"
    add("inputs", nargs="*", metavar="INPUT", help=suffixes)
    add("--output", type=Path, metavar="DIR", help="directory to write; one below it per source")
    layouts = sorted(corpus_layouts.LAYOUTS)
    add("--layout", choices=layouts, help="published corpus that INPUT is a copy of")
    add("--text-column", default="text", metavar="NAME", help="field of the text (default: text)")
    cores, workers = os.cpu_count(), "processes (default: one per core)"
    add("--workers", type=parse_positive_int, default=cores, metavar="N", help=workers)
    add("--skip-damaged", action="store_true", help="skip and count damaged documents")
    unsupported = "convert the supported files although most others are not"
    add("--skip-unsupported", action="store_true", help=unsupported)
    add("--inspect", metavar="PATH", help="print counts, sizes, tokens and samples")
    tokenizer = "tokenizer.json for the token counts of inspect="
    add("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    add("--verify", type=Path, metavar="DIR", help="compare prepared files with their checksums")
    return parser


def _find_usage_error(arguments: argparse.Namespace) -> str | None:
    """Return the problem of settings that are valid one by one but not together."""
    values = (arguments.inputs, arguments.inspect, arguments.verify)
    given = [m for m, v in zip(("INPUT", "inspect=", "verify="), values, strict=True) if v]
    if len(given) > 1:
        return f"{' and '.join(given)} cannot be combined"
    if bool(arguments.inputs) != bool(arguments.output):
        return (
            f"INPUT and output= are needed together; {'output=' if given else 'INPUT'} is missing"
        )
    skips = arguments.skip_damaged or arguments.skip_unsupported
    if (arguments.layout or skips) and given != ["INPUT"]:
        return "layout=, skip_damaged= and skip_unsupported= need INPUT and output="
    if arguments.tokenizer and given != ["inspect="]:
        return "tokenizer= needs inspect="
    return None


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.inspect:
        sources = corpus_inspection.inspect_corpus(arguments.inspect, arguments.text_column)
        for line in corpus_inspection.format_report(sources, arguments.tokenizer):
            print(line)
        return ExitCode.FINISHED
    if arguments.verify:
        return _verify(arguments.verify)
    return _prepare(arguments) if arguments.inputs else _prepare_embedded()


def _prepare_embedded() -> int:
    directory = embedded_corpus.prepare_embedded_corpus()
    print(f"embedded corpus: {directory}")
    for name in embedded_corpus.SOURCE_NAMES:
        corpus = ArrowDataset([directory / f"{name}.arrow"], "text")
        print(f"  embedded:{name:<6} {len(corpus):>6} rows {corpus.num_bytes / 1e6:>7.2f} MB")
    return ExitCode.FINISHED


def _prepare(arguments: argparse.Namespace) -> int:
    output = arguments.output.expanduser().absolute()
    skipped = Counter[str]()
    files = input_files.find_input_files(arguments.inputs, output, skipped)
    problem = _format_skipped_files(skipped, len(files))
    if skipped.total() > len(files) and not (arguments.layout or arguments.skip_unsupported):
        raise ConfigError(f"{problem}; add skip_unsupported=true to convert the others")
    sources, notes = preparation.plan_sources(
        output, files, arguments.text_column, arguments.layout, skipped
    )
    for note in [problem, *notes] if skipped else notes:
        print(note)
    preparation.prepare_sources(sources, arguments.workers, arguments.skip_damaged, print_line)
    print(f"train on it: {preparation.format_train_command(output, arguments.layout)}")
    return ExitCode.FINISHED


def _format_skipped_files(skipped: Counter[str], num_read: int) -> str:
    """Return the number of files that are skipped, by suffix."""
    suffixes = ", ".join(
        f"{count:,} {format_value(suffix)}"
        for suffix, count in sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    )
    return (
        f"{skipped.total():,} of {skipped.total() + num_read:,} files are skipped ({suffixes}); "
        f"supported: {input_files.SUPPORTED_SUFFIXES}"
    )


def _verify(directory: Path) -> int:
    num_bytes, problems = corpus_manifest.verify_corpus(directory)
    for problem in problems:
        print(problem, file=sys.stderr)
    verdict = f"{len(problems)} files are damaged" if problems else "all files are intact"
    print(f"{directory}: {format_bytes(num_bytes)}; {verdict}")
    return ExitCode.FAILED if problems else ExitCode.FINISHED


if __name__ == "__main__":
    run_and_exit(main)
