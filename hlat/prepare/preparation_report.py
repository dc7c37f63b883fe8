"""Report of a preparation: counts, lengths, tokens, duplicates, removed documents and samples.

`prepare_report.json` has all values, `prepare_report.md` is for reading. They depend on the inputs
and settings only.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.config.untrusted_files import format_value
from hlat.data.tokenizer_round_trip import LostText, merge_lost_text
from hlat.prepare import file_formats, job_pool, shard_statistics, text_losses
from hlat.prepare.corpus_manifest import CorpusManifest, load_work_file, write_json
from hlat.prepare.preparation_output import REMOVED_FILE, REPORT_DIR
from hlat.prepare.preparation_source import PreparationSource
from hlat.prepare.shard_statistics import StatisticsJob
from hlat.prepare.text_losses import TextLoss
from hlat.storage import durable_files
from hlat.storage.progress_bar import ProgressBar, format_bytes

JSON_FILE = "prepare_report.json"
MARKDOWN_FILE = "prepare_report.md"
FORMAT_VERSION = 2
_BAR_WIDTH = 30
_MAX_SUFFIXES = 12


def write_report(
    source: PreparationSource,
    manifests: Mapping[str, CorpusManifest],
    tokenizer: Path | None,
    num_workers: int,
) -> dict[str, Any]:
    """Write the report of a prepared source unless it exists, and return its values.

    Raises:
        ConfigError: If the tokenizer cannot be used.
        OSError: If a file cannot be written.
    """
    path = source.directory / JSON_FILE
    identity = _compute_identity(manifests, tokenizer)
    try:
        report = load_work_file(path)
        if report.get("identity") == identity:
            return report
    except (FileNotFoundError, ConfigError):
        pass
    work_dir = source.directory / REPORT_DIR
    durable_files.make_directory(work_dir)
    jobs = {
        name: _build_jobs(source.targets[name], work_dir, manifest, tokenizer, identity)
        for name, manifest in manifests.items()
    }
    _run_jobs(source, [job for some in jobs.values() for job in some], num_workers)
    report = {
        "format": FORMAT_VERSION,
        "identity": identity,
        "settings": source.settings.to_json(),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "inputs": _summarize_inputs(source, next(iter(manifests.values()))),
        "sources": {
            name: _summarize_source(source.targets[name], manifest, jobs[name])
            for name, manifest in manifests.items()
        },
        "removed_samples": _load_removed_samples(work_dir, path),
    }
    markdown = "\n".join(_format_markdown(report)) + "\n"
    content = markdown.encode("utf-8", "backslashreplace")  # file names may be no UTF-8
    durable_files.replace_file(source.directory / MARKDOWN_FILE, content, durable=True)
    write_json(path, report)
    shutil.rmtree(work_dir)
    return report


def _compute_identity(manifests: Mapping[str, CorpusManifest], tokenizer: Path | None) -> str:
    """Return a hash of all shards and of the tokenizer."""
    digest = hashlib.sha256(str(FORMAT_VERSION).encode())
    for name, manifest in manifests.items():
        digest.update("".join([name, *(shard.sha256 for shard in manifest.files)]).encode())
    if tokenizer is not None:
        shard_statistics.load_encoder(tokenizer)
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()[:24]


def _build_jobs(
    directory: Path,
    work_dir: Path,
    manifest: CorpusManifest,
    tokenizer: Path | None,
    identity: str,
) -> list[StatisticsJob]:
    return [
        StatisticsJob(
            directory / shard.name,
            shard.rows,
            shard.text_bytes,
            tokenizer,
            work_dir / f"{identity}-{manifest.source}-{shard.name}.json",
        )
        for shard in manifest.files
    ]


def _run_jobs(source: PreparationSource, jobs: Sequence[StatisticsJob], num_workers: int) -> None:
    unfinished = [job for job in jobs if not job.output.is_file()]
    num_bytes = sum(job.num_bytes for job in jobs)
    num_done = num_bytes - sum(job.num_bytes for job in unfinished)
    label = f"counting {source.directory}"
    num_workers = job_pool.limit_workers(num_workers, num_bytes)
    with closing(ProgressBar(label, num_bytes, num_done)) as progress:
        for _ in job_pool.run_jobs(
            shard_statistics.run_statistics_job, unfinished, num_workers, progress
        ):
            pass


def _summarize_inputs(source: PreparationSource, manifest: CorpusManifest) -> dict[str, Any]:
    by_suffix: dict[str, dict[str, int]] = {}
    for record in manifest.inputs:
        counts = by_suffix.setdefault(
            file_formats.get_suffix(record.path), {"files": 0, "documents": 0, "text_bytes": 0}
        )
        counts["files"] += 1
        counts["documents"] += record.documents
        counts["text_bytes"] += record.text_bytes
    return {
        "files": len(manifest.inputs),
        "bytes": sum(record.bytes for record in manifest.inputs),
        "by_suffix": dict(sorted(by_suffix.items(), key=lambda item: -item[1]["text_bytes"])),
        "skipped_files": [asdict(record) for record in source.skipped],
        "empty": manifest.totals["empty"],
        "removed": manifest.removed,
        "lost": [asdict(loss) for loss in manifest.lost],
        "encodings": manifest.encodings,
        "text_bytes": manifest.num_bytes_read,
    }


def _summarize_source(
    directory: Path, manifest: CorpusManifest, jobs: Sequence[StatisticsJob]
) -> dict[str, Any]:
    results = [load_work_file(job.output) for job in jobs]
    digests = np.concatenate([np.load(job.digest_file) for job in jobs])
    histogram = np.sum([[r["documents_by_bin"], r["bytes_by_bin"]] for r in results], axis=0)
    totals = manifest.totals
    samples = [text for result in results for text in result["samples"]]
    spaced = np.linspace(0, len(samples) - 1, min(len(samples), shard_statistics.NUM_SAMPLES))
    return {
        "path": str(directory),
        "documents": totals["documents"],
        "text_bytes": totals["text_bytes"],
        "longest_bytes": max(shard.longest_bytes for shard in manifest.files),
        "tokens": sum(r["tokens"] for r in results) if results[0]["tokens"] is not None else None,
        "lost_text": [r["lost_text"] for r in results if r["lost_text"] is not None],
        "exact_duplicates": len(digests) - len(np.unique(digests)),
        "histogram": [
            {"below_bytes": bound, "documents": int(count), "text_bytes": int(size)}
            for bound, count, size in zip(_list_bounds(), *histogram, strict=True)
            if count
        ],
        "samples": [samples[int(i)] for i in spaced],
    }


def _list_bounds() -> list[int | None]:
    bits = range(shard_statistics.FIRST_BIN_BITS, shard_statistics.NUM_BINS + 5)
    return [*(1 << number for number in bits), None]


def _load_removed_samples(work_dir: Path, previous_report: Path) -> dict[str, Any]:
    """Return samples of removed documents, from the preparation or an earlier report."""
    try:
        return load_work_file(work_dir / REMOVED_FILE)
    except FileNotFoundError:
        pass
    try:
        samples = load_work_file(previous_report).get("removed_samples")
    except (FileNotFoundError, ConfigError):
        samples = None
    return samples if isinstance(samples, dict) else {"filters": {}, "duplicates": []}


def format_summary(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for the screen: lost text, sources, removed documents and a histogram."""
    inputs = report["inputs"]
    yield f"read: {inputs['files']:,} files, {format_bytes(inputs['bytes'])}"
    yield from _list_losses(inputs)
    yield ""
    yield from _format_table(_list_source_rows(report))
    yield from _list_lost_text(report)
    yield from _list_removed(report)
    yield ""
    yield from _format_table(_list_histogram_rows(report))


def _list_losses(inputs: Mapping[str, Any], **limit: int) -> Iterator[str]:
    """Yield lines on converted and on lost documents."""
    yield from text_losses.format_encodings(inputs["encodings"])
    losses = [TextLoss(**loss) for loss in inputs["lost"]]
    yield from text_losses.format_losses(losses, inputs["text_bytes"], **limit)


def _list_source_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("source", "documents", "text", "mean", "longest", "tokens", "bytes/token")
    ]
    for name, one in report["sources"].items():
        num_tokens, num_bytes = one["tokens"], one["text_bytes"]
        rows.append(
            (
                name,
                f"{one['documents']:,}",
                format_bytes(num_bytes),
                format_bytes(num_bytes / max(1, one["documents"])),
                format_bytes(one["longest_bytes"]),
                "-" if num_tokens is None else f"{num_tokens:,}",
                "-" if num_tokens is None else f"{num_bytes / max(1, num_tokens):.2f}",
            )
        )
    return rows


def _list_lost_text(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence per source on the text that the tokenizer loses, if one is given."""
    for name, one in report["sources"].items():
        if one["lost_text"]:
            lost = merge_lost_text([LostText(**part) for part in one["lost_text"]])
            yield f"{report['tokenizer']} loses {lost} of samples of {name}"


def _list_removed(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on documents that were removed or are duplicates."""
    inputs = report["inputs"]
    counts = {"empty": inputs["empty"], **inputs["removed"]}
    listed = [f"{count:,} {name}" for name, count in counts.items() if count]
    if listed:
        yield f"removed documents: {', '.join(listed)}"
    num_duplicates = sum(one["exact_duplicates"] for one in report["sources"].values())
    if num_duplicates:
        yield (
            f"{num_duplicates:,} documents are exact copies of others; remove them with dedup=exact"
        )


def _list_histogram_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row per length of documents, over all sources."""
    counts: dict[int | None, list[int]] = {}
    for one in report["sources"].values():
        for entry in one["histogram"]:
            sums = counts.setdefault(entry["below_bytes"], [0, 0])
            sums[0] += entry["documents"]
            sums[1] += entry["text_bytes"]
    most = max(documents for documents, _ in counts.values())
    rows: list[tuple[str, ...]] = [("length", "documents", "text", "")]
    for bound in _list_bounds():
        if bound in counts:
            documents, num_bytes = counts[bound]
            label = "longer" if bound is None else f"< {_format_power(bound)}"
            bar = "#" * -(-documents * _BAR_WIDTH // most)
            rows.append((label, f"{documents:,}", format_bytes(num_bytes), bar))
    return rows


def _format_power(num_bytes: int) -> str:
    for unit, bits in (("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << bits:
            return f"{num_bytes >> bits} {unit}"
    return f"{num_bytes} B"


def _format_table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        *numbers, last = cells
        padded = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        is_number = rows[0][-1] != ""
        end = last.rjust(widths[-1]) if is_number else last
        yield "  ".join([first.ljust(widths[0]), *padded, end]).rstrip()


def _format_markdown(report: Mapping[str, Any]) -> Iterator[str]:
    inputs = report["inputs"]
    yield "# Preparation report"
    yield ""
    settings = " ".join(f"{key}={_format_setting(v)}" for key, v in report["settings"].items())
    size = format_bytes(inputs["bytes"])
    yield f"{inputs['files']:,} files, {size}. Settings: {settings or 'none'}."
    yield ""
    yield from _format_markdown_table(_list_source_rows(report))
    yield ""
    for name, one in report["sources"].items():
        yield f"* {name}: `{one['path']}`"
    if report["tokenizer"]:
        yield f"* tokenizer: `{report['tokenizer']}`; one end-of-text token per document is counted"
    yield from (f"* {line}" for line in _list_lost_text(report))
    lost = [*_list_losses(inputs, max_files=len(inputs["lost"]))]
    yield from _format_section("Lost text", [f"    {line}" for line in lost])
    yield from _format_section("Removed documents", [f"* {one}" for one in _list_removed(report)])
    yield from _format_section(
        "Length of documents", _format_markdown_table(_list_histogram_rows(report))
    )
    yield from _format_section("Files", _format_markdown_table(_list_suffix_rows(inputs)))
    for name, one in report["sources"].items():
        yield from _format_section(f"Samples of {name}", _format_samples(one["samples"]))
    removed = report["removed_samples"]
    for name, texts in removed["filters"].items():
        yield from _format_section(f"Removed by {name}", _format_samples(texts[:3]))
    for number, texts in enumerate(removed["duplicates"], 1):
        yield from _format_section(f"Near duplicates {number}", _format_samples(texts))


def _format_setting(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if str(value).isprintable() else json.dumps(value)


def _list_suffix_rows(inputs: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("suffix", "files", "documents", "text")]
    entries = [*inputs["by_suffix"].items()]
    rows += [
        (
            format_value(suffix),
            f"{n['files']:,}",
            f"{n['documents']:,}",
            format_bytes(n["text_bytes"]),
        )
        for suffix, n in entries[:_MAX_SUFFIXES]
    ]
    return rows + [
        (f"{format_value(one['suffix'])} ({one['reason']})", f"{one['files']:,}", "", "")
        for one in inputs["skipped_files"][:_MAX_SUFFIXES]
    ]


def _format_section(title: str, lines: "Iterator[str] | list[str]") -> Iterator[str]:
    content = [*lines]
    if content:
        yield from ("", f"## {title}", "", *content)


def _format_markdown_table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    header, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    yield f"| {' | '.join(header)} |"
    yield f"|---|{''.join('---:|' if title else '---|' for title in header[1:])}"
    for row in body:
        yield f"| {' | '.join(row)} |"


def _format_samples(texts: Sequence[str]) -> Iterator[str]:
    """Yield texts as indented blocks, with control characters escaped."""
    for number, text in enumerate(texts):
        if number:
            yield from ("", "---", "")
        for line in text.splitlines() or [""]:
            yield "    " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
