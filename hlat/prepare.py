"""Turns corpora into what a run reads, and looks into them: `python -m hlat.prepare`.

A run maps Arrow files and reads single rows of them; corpora come as compressed lines and Parquet.
Without arguments it prepares the embedded corpus, for machines whose compute nodes should find it
ready.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hlat.config.arguments import Parser, leave
from hlat.config.errors import ConfigError, Exit
from hlat.data import embedded, library
from hlat.data.corpus import Corpus
from hlat.data.preparation import inputs, inspection, layouts, prepare, prepared
from hlat.data.preparation.progress import format_bytes, tell

_EXAMPLES = """\
examples:
  python -m hlat.prepare                                          the embedded corpus
  python -m hlat.prepare texts/*.jsonl.zst --output data/mine     files of your own
  python -m hlat.prepare s3://bucket/texts --output data/mine     a folder of a bucket (needs s3fs)
  python -m hlat.prepare RedPajama-Data-1T --layout redpajama --output data
  python -m hlat.prepare --inspect data                           what is in it
  python -m hlat.prepare --verify data                            is it still as it was written

The same command goes on after Ctrl-C, a kill or a full disk."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m hlat.prepare",
        description="Convert documents to the Arrow files that a run maps, or look into them. "
        "Without arguments:\nprepare the embedded corpus, the documents of Python's library, in "
        "$HLAT_CACHE,\n$XDG_CACHE_HOME/hlat or ~/.cache/hlat.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help=f"files, folders, URLs: {inputs.READABLE}")
    add("--output", type=Path, metavar="DIR", help="folder to write; sources of a layout below it")
    add("--layout", choices=sorted(layouts.LAYOUTS), help="the published corpus that INPUT is")
    add("--text-column", default="text", metavar="NAME", help="field of the text (default: text)")
    cores = os.cpu_count()
    add("--workers", type=int, default=cores, metavar="N", help=f"processes (default: {cores})")
    add("--skip-damaged", action="store_true", help="leave damaged documents out and count them")
    add("--inspect", metavar="PATH", help="show counts, sizes, tokens and samples of any of these")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json that --inspect counts with")
    add("--verify", type=Path, metavar="DIR", help="compare prepared files with their checksums")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say, and print what came of it."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    problem = _misuse(arguments)
    if problem:
        parser.error(problem)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: the same command goes on", file=sys.stderr)
        return Exit.PREEMPTED
    except OSError as error:
        place = arguments.output or error.filename
        named = f"{place}: cannot be written ({error.strerror})" if error.errno else str(error)
        print(f"{named}; what is finished is kept: the same command goes on", file=sys.stderr)
        return Exit.FAILED


def _misuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the flags together, if anything is."""
    values = (arguments.inputs, arguments.inspect, arguments.verify)
    given = [m for m, v in zip(("INPUT", "--inspect", "--verify"), values, strict=True) if v]
    if len(given) > 1:
        return f"{' and '.join(given)} do different things; use one at a time"
    if bool(arguments.inputs) != bool(arguments.output):
        return f"INPUT and --output belong together; {'--output' if given else 'INPUT'} is missing"
    if (arguments.layout or arguments.skip_damaged) and given != ["INPUT"]:
        return "--layout and --skip-damaged go with INPUT and --output"
    if arguments.tokenizer and given != ["--inspect"]:
        return "--tokenizer goes with --inspect"
    return "--workers must be 1 or more" if arguments.workers < 1 else None


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.inspect:
        sources = inspection.inspect(arguments.inspect, arguments.text_column)
        for line in inspection.report(sources, arguments.tokenizer):
            print(line)
        return Exit.FINISHED
    if arguments.verify:
        return _verify(arguments.verify)
    return _prepare(arguments) if arguments.inputs else _prepare_embedded()


def _prepare_embedded() -> int:
    folder = embedded.prepare()
    print(f"embedded corpus: {folder}")
    for name in library.NAMES:
        corpus = Corpus([folder / f"{name}.arrow"], "text")
        print(f"  embedded:{name:<6} {len(corpus):>6} rows {corpus.num_bytes / 1e6:>7.2f} MB")
    return Exit.FINISHED


def _prepare(arguments: argparse.Namespace) -> int:
    output = arguments.output.expanduser().absolute()
    found = inputs.find(arguments.inputs, output)
    sources, notes = prepare.plan(output, found, arguments.text_column, arguments.layout)
    for note in notes:
        print(note)
    prepare.prepare(sources, arguments.workers, arguments.skip_damaged, tell)
    print(f"train on it: {prepare.command(output, arguments.layout)}")
    return Exit.FINISHED


def _verify(folder: Path) -> int:
    num_bytes, problems = prepared.verify(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    verdict = f"{len(problems)} of its files are not" if problems else "all files are"
    print(f"{folder}: {format_bytes(num_bytes)}; {verdict} as they were written")
    return Exit.FAILED if problems else Exit.FINISHED


if __name__ == "__main__":
    leave(main)
