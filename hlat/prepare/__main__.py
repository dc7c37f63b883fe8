"""Convert corpora to training data, and inspect them: `hlat prepare`.

A run maps Arrow files and reads single rows; corpora are text files, compressed JSON lines and
Parquet. Without arguments this command prepares the embedded corpus, for machines whose compute
nodes have no network.
"""

import argparse
import codecs
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    parse_number,
    parse_positive_int,
    run_and_exit,
)
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.data_domains import list_domains
from hlat.data import embedded_corpus
from hlat.data.arrow_dataset import ArrowDataset
from hlat.prepare import (
    corpus_inspection,
    corpus_layouts,
    corpus_manifest,
    document_filters,
    document_signatures,
    file_formats,
    input_files,
    preparation,
    preparation_report,
    preparation_source,
    shard_statistics,
    text_losses,
    train_command,
)
from hlat.prepare.corpus_manifest import CorpusManifest
from hlat.prepare.document_filters import FilterSettings
from hlat.prepare.document_settings import DocumentSettings
from hlat.prepare.input_files import SkippedFile
from hlat.prepare.preparation_source import PreparationSource
from hlat.storage.data_file import is_remote
from hlat.storage.progress_bar import format_bytes, print_line

_EXAMPLES = """\
examples:
  hlat prepare                                           the embedded corpus
  hlat prepare my/texts                                  your own files, to data/texts
  hlat prepare my/texts dedup=minhash heldout=0.01 min_chars=200 language=en
  hlat prepare my/texts filters=my_filters.py:drop_short,my_filters.py:mask_email
  hlat prepare texts/*.jsonl.zst output=data/mine        some files
  hlat prepare s3://bucket/texts output=data/mine        a bucket (needs s3fs)
  hlat prepare my/corpus domains=true heldout=0.01       each directory of my/corpus as a source
  hlat prepare roneneldan/TinyStories                    a data set of huggingface.co
  hlat prepare RedPajama-Data-1T layout=redpajama output=data
  hlat prepare inspect=data                              counts, sizes, tokens and samples
  hlat prepare verify=data                               compare with the checksums

The same command continues after Ctrl-C, a kill or a full disk. See docs/data.md."""

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_MAX_HELDOUT = 0.5
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
    inputs = f"files, directories, URLs, data sets: {file_formats.SUPPORTED_FORMATS}"
    add("inputs", nargs="*", metavar="INPUT", help=inputs)
    output = "directory to write (default: data/NAME of INPUT)"
    add("--output", type=Path, metavar="DIR", help=output)
    layouts = sorted(corpus_layouts.LAYOUTS)
    add("--layout", choices=layouts, help="published corpus that INPUT is a copy of")
    domains = "prepare each directory in INPUT as one source, below output"
    add("--domains", action="store_true", help=domains)
    add("--text-column", default="text", metavar="NAME", help="field of the text (default: text)")
    cores, workers = os.cpu_count(), "processes (default: one per core)"
    add("--workers", type=parse_positive_int, default=cores, metavar="N", help=workers)
    _add_document_settings(parser)
    add("--skip-damaged", action="store_true", help="skip, count and list damaged documents")
    lost = "fraction of the text that skip_damaged=true may lose (default: 0.01, no whole file)"
    add("--max-lost", type=_parse_lost_fraction, metavar="X", help=lost)
    unsupported = "convert the supported files although most others are not"
    add("--skip-unsupported", action="store_true", help=unsupported)
    add("--inspect", metavar="PATH", help="print counts, sizes, tokens and samples")
    tokenizer = "tokenizer.json for token counts and the printed command"
    add("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    add("--verify", type=Path, metavar="DIR", help="compare prepared files with their checksums")
    return parser


def _add_document_settings(parser: CommandLineParser) -> None:
    add = parser.add_argument
    separator = r"text between the documents of text files, such as \n\n (default: one per file)"
    add("--separator", type=_parse_separator, metavar="TEXT", help=separator)
    encoding = "encoding of text that is not Unicode, such as windows-1252 (default: it is damaged)"
    add("--encoding", type=_parse_encoding, metavar="NAME", help=encoding)
    shortest, longest = "remove shorter documents", "remove longer documents"
    add("--min-chars", type=parse_positive_int, metavar="N", help=shortest)
    add("--max-chars", type=parse_positive_int, metavar="N", help=longest)
    languages = "keep documents in these languages (ISO 639-1), such as en,de"
    add("--language", type=build_list_parser(_parse_language), metavar="A,B", help=languages)
    filters = "functions that return the text of a document, changed or not, or None to remove it"
    add("--filters", type=build_list_parser(str), metavar="FILE:F,..", help=filters)
    dedup = "remove exact copies, or near duplicates too"
    add("--dedup", choices=("exact", "minhash"), help=dedup)
    heldout = "fraction of documents for DIR/heldout; the others are in DIR/train"
    add("--heldout", type=_parse_fraction, metavar="X", help=heldout)
    add("--seed", type=int, default=0, metavar="N", help="seed of heldout= (default: 0)")


def _parse_separator(text: str) -> str:
    separator = re.sub(r"\\([nrt\\])", lambda m: _ESCAPES[m[1]], text)
    if not separator:
        raise argparse.ArgumentTypeError("is empty; omit it for one document per file")
    return separator


def _parse_encoding(text: str) -> str:
    try:
        b"text".decode(text)
        return codecs.lookup(text).name
    except (LookupError, UnicodeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not an encoding of Python") from error


def _parse_language(text: str) -> str:
    if not re.fullmatch(r"[a-z]{2,3}", text):
        raise argparse.ArgumentTypeError(f"{text} is not a language code such as en")
    return text


def _parse_fraction(text: str) -> float:
    fraction = parse_number(text, integer=False, positive=True)
    if fraction > _MAX_HELDOUT:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction of {_MAX_HELDOUT} or less")
    return fraction


def _parse_lost_fraction(text: str) -> float:
    fraction = 0.0 if text == "0" else parse_number(text, integer=False, positive=True)
    if fraction > 1:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction of 1 or less")
    return fraction


def _find_usage_error(arguments: argparse.Namespace) -> str | None:
    """Return the problem of settings that are valid one by one but not together."""
    values = (arguments.inputs, arguments.inspect, arguments.verify)
    given = [m for m, v in zip(("INPUT", "inspect=", "verify="), values, strict=True) if v]
    if len(given) > 1:
        return f"{' and '.join(given)} cannot be combined"
    needs_input = [
        *("output", "layout", "domains", "skip_damaged", "skip_unsupported", "separator"),
        *("min_chars", "max_chars", "language", "filters", "dedup", "heldout", "seed"),
        *("encoding", "max_lost"),
    ]
    if given != ["INPUT"]:
        for name in needs_input:
            if getattr(arguments, name):
                return f"{name}= needs INPUT"
    if arguments.max_lost is not None and not arguments.skip_damaged:
        return "max_lost= needs skip_damaged=true"
    if arguments.layout and not arguments.output:
        return "layout= needs output="
    if arguments.domains and (arguments.layout or len(arguments.inputs) > 1):
        return "domains= needs one INPUT and no layout="
    if arguments.layout and arguments.heldout:
        return "layout= and heldout= cannot be combined"
    if arguments.seed and not arguments.heldout:
        return "seed= needs heldout="
    if len(arguments.inputs) > 1 and not arguments.output:
        return "several INPUTs need output="
    if arguments.tokenizer and given == ["verify="]:
        return "tokenizer= cannot be combined with verify="
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
    settings = _build_settings(arguments)
    if arguments.tokenizer:
        shard_statistics.load_encoder(arguments.tokenizer)
    output = (arguments.output or _choose_output(arguments.inputs[0])).expanduser().absolute()
    if arguments.domains:
        return _prepare_domains(arguments, output, settings)
    if arguments.layout:
        return _prepare_layout(arguments, output, settings)
    source, counts = _prepare_directory(arguments, arguments.inputs, output, settings)
    command = train_command.format_train_command(source.targets, counts, arguments.tokenizer)
    print(f"train on it: {command}")
    return ExitCode.FINISHED


def _prepare_layout(
    arguments: argparse.Namespace, output: Path, settings: DocumentSettings
) -> ExitCode:
    """Prepare the sources of a layout."""
    sources = _plan_sources(arguments, arguments.inputs, output, settings)
    manifests = _convert(arguments, sources)
    for manifest in manifests.values():
        for line in text_losses.format_losses(manifest.lost, manifest.num_bytes_read):
            print_line(line)
    print(f"train on it: {train_command.format_layout_command(output, arguments.layout)}")
    return ExitCode.FINISHED


def _prepare_domains(
    arguments: argparse.Namespace, output: Path, settings: DocumentSettings
) -> ExitCode:
    """Prepare each directory of the input as one source with its own report."""
    domains = list_domains("INPUT", Path(arguments.inputs[0]).expanduser())
    counts = [
        _prepare_directory(arguments, [str(domain)], output / domain.name, settings)[1]
        for domain in domains
    ]
    documents = [count for each in counts for count in each.values()]
    reserved = None if settings.heldout is not None else min(documents)
    command = train_command.format_domains_command(output, reserved, arguments.tokenizer)
    print(f"train on it: {command}")
    return ExitCode.FINISHED


def _prepare_directory(
    arguments: argparse.Namespace, inputs: Sequence[str], output: Path, settings: DocumentSettings
) -> tuple[PreparationSource, dict[str, int]]:
    """Prepare one source with its report; return it, and the documents of its directories."""
    sources = _plan_sources(arguments, inputs, output, settings)
    (source,) = sources
    manifests = _convert(arguments, sources)
    report = preparation_report.write_report(
        source, manifests, arguments.tokenizer, arguments.workers
    )
    for line in preparation_report.format_summary(report):
        print_line(line)
    print(f"report: {output / preparation_report.MARKDOWN_FILE}")
    return source, {name: manifest.totals["documents"] for name, manifest in manifests.items()}


def _plan_sources(
    arguments: argparse.Namespace, inputs: Sequence[str], output: Path, settings: DocumentSettings
) -> list[PreparationSource]:
    """Return the sources to prepare; print which files are skipped or missing.

    Raises:
        ConfigError: An input cannot be read, or most of its files are not supported.
    """
    skipped: list[SkippedFile] = []
    files = input_files.find_input_files(inputs, output, skipped)
    records = text_losses.group_skipped(skipped)
    lines = [*text_losses.format_skipped(records, len(files))]
    num_unsupported = sum(one.reason != input_files.PREPARED_OUTPUT for one in skipped)
    if num_unsupported > len(files) and not (arguments.layout or arguments.skip_unsupported):
        remedy = "most files are skipped; add skip_unsupported=true to convert the others"
        raise ConfigError(f"{remedy} ({file_formats.SUPPORTED_FORMATS})", *lines)
    sources, notes = preparation_source.plan_sources(
        output, files, arguments.text_column, arguments.layout, records, settings
    )
    for line in [*lines, *notes]:
        print_line(line)
    return sources


def _convert(
    arguments: argparse.Namespace, sources: Sequence[PreparationSource]
) -> dict[str, CorpusManifest]:
    return preparation.prepare_sources(
        sources, arguments.workers, arguments.skip_damaged, print_line, arguments.max_lost
    )


def _build_settings(arguments: argparse.Namespace) -> DocumentSettings:
    if arguments.language:
        document_filters.validate_language_library()
    if arguments.dedup == "minhash":
        document_signatures.validate_minhash_library()
    filters = FilterSettings(
        arguments.min_chars,
        arguments.max_chars,
        tuple(arguments.language or ()),
        document_filters.parse_function_filters(arguments.filters or ()),
    )
    return DocumentSettings(
        arguments.separator,
        arguments.encoding,
        filters,
        arguments.dedup,
        arguments.heldout,
        arguments.seed,
    )


def _choose_output(location: str) -> Path:
    """Return the directory for an input, named after it."""
    path = (
        location.rstrip("/") if is_remote(location) else str(Path(location).expanduser().resolve())
    )
    name = path.rpartition("/")[2]
    if not Path(path).is_dir():
        name = name.partition(".")[0]
    return Path("data") / (re.sub(r"[^\w.-]+", "_", name).strip("._") or "texts")


def _verify(directory: Path) -> int:
    num_bytes, problems = corpus_manifest.verify_corpus(directory)
    for problem in problems:
        print(problem, file=sys.stderr)
    verdict = f"{len(problems)} files are damaged" if problems else "all files are intact"
    print(f"{directory}: {format_bytes(num_bytes)}; {verdict}")
    return ExitCode.FAILED if problems else ExitCode.FINISHED


if __name__ == "__main__":
    run_and_exit(main)
