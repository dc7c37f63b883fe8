"""Completion of a prepared directory: selection of documents, names of shards, and manifests.

Files get their final names in one pass, recorded before it starts, so that a killed attempt can be
undone.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.prepare import (
    arrow_shards,
    conversion_job,
    corpus_manifest,
    document_selection,
    job_pool,
    text_losses,
)
from hlat.prepare.arrow_shards import ShardRecord
from hlat.prepare.conversion_job import ConversionJob, JobReceipt
from hlat.prepare.corpus_manifest import CorpusManifest, IndexRecord, write_json
from hlat.prepare.document_selection import Selection, SelectionJob
from hlat.prepare.document_settings import TRAIN
from hlat.prepare.preparation_source import PreparationSource
from hlat.storage import durable_files
from hlat.storage.progress_bar import ProgressBar

REPORT_DIR = ".report"
"""Directory of intermediate results of the report, hidden as the work directory is."""
REMOVED_FILE = "removed.json"
"""File in `REPORT_DIR` with samples of removed documents."""
SETTINGS_FILE = "settings.json"
"""File in the work directory with the settings that finished jobs require."""
_MOVES_FILE = "moves.json"


def complete_source(
    source: PreparationSource,
    jobs: Sequence[ConversionJob],
    num_workers: int,
    max_lost: float | None = None,
) -> dict[str, CorpusManifest]:
    """Select documents if necessary, rename the shards of all jobs, and write the manifests.

    Raises:
        ConfigError: If there is no document, or more text is lost than `max_lost` allows. Finished
            jobs are kept in the second case.
    """
    job_dirs = [job.output_dir for job in jobs]
    receipts = _load_receipts(job_dirs)
    summary = _summarize_receipts(source, receipts)
    _validate_summary(source, summary, max_lost)
    shard_dirs, selection = {source.name: job_dirs}, None
    removed = Counter(summary.removed)
    if source.settings.needs_signatures:
        shard_dirs, selection = _select_documents(source, job_dirs, receipts, num_workers)
        removed.update(selection.removed)
    manifests: dict[str, CorpusManifest] = {}
    moves: dict[str, str] = {}
    for name, directories in shard_dirs.items():
        files, indices, renamed = _number_shards(source, source.targets[name], directories)
        moves |= renamed
        manifests[name] = replace(
            summary, source=name, files=files, indices=indices, removed=dict(removed)
        )
    _validate_targets(source, manifests)
    _write_removed_samples(source, receipts, selection)
    _publish(source, manifests, moves)
    return manifests


def _publish(
    source: PreparationSource, manifests: Mapping[str, CorpusManifest], moves: Mapping[str, str]
) -> None:
    """Rename the shards, write the manifests, and remove the jobs."""
    write_json(source.work_dir / _MOVES_FILE, moves)
    for directory in source.targets.values():
        durable_files.make_directory(directory)
    for old, new in moves.items():
        os.replace(source.directory / old, source.directory / new)
    for directory in source.targets.values():
        durable_files.fsync_directory(directory)
    for name, manifest in manifests.items():
        corpus_manifest.write_corpus_manifest(source.targets[name], manifest, source.work_dir)
    shutil.rmtree(source.work_dir)


def _load_receipts(job_dirs: Iterable[Path]) -> list[JobReceipt]:
    receipts = map(conversion_job.load_receipt, job_dirs)
    return [receipt for receipt in receipts if receipt is not None]


def _summarize_receipts(
    source: PreparationSource, receipts: Sequence[JobReceipt]
) -> CorpusManifest:
    """Return a manifest without shards."""
    removed: Counter[str] = Counter()
    encodings: Counter[str] = Counter()
    for receipt in receipts:
        removed.update(receipt.removed)
        encodings.update(receipt.encodings)
    return CorpusManifest(
        source=source.name,
        layout=source.layout,
        input_column=source.column,
        files=(),
        indices=(),
        inputs=tuple(record for receipt in receipts for record in receipt.inputs),
        skipped_files=source.skipped,
        settings=source.settings.to_json(),
        removed=dict(removed),
        lost=tuple(loss for receipt in receipts for loss in receipt.lost),
        encodings=dict(encodings),
        num_bytes_read=sum(receipt.num_bytes_read for receipt in receipts),
    )


def _validate_summary(
    source: PreparationSource, summary: CorpusManifest, max_lost: float | None
) -> None:
    """Raise ConfigError if there is no document, which removes the jobs, or too much lost text."""
    if not any(record.documents for record in summary.inputs):
        shutil.rmtree(source.work_dir)
        totals = summary.totals
        counts = {
            **{name: totals[name] for name in ("empty", "damaged")},
            **{f"removed by {name}": count for name, count in summary.removed.items()},
        }
        listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        settings = "the filters" if summary.removed else f"text_column={source.column}"
        raise ConfigError(
            f"{source.directory}: its inputs contain no document ({listed}); check {settings}",
            *text_losses.format_losses(summary.lost, summary.num_bytes_read),
        )
    try:
        text_losses.validate_losses(
            str(source.directory), summary.lost, summary.num_bytes_read, max_lost
        )
    except ConfigError:
        (source.work_dir / SETTINGS_FILE).unlink()  # the remedy may be another setting
        raise


def _validate_targets(source: PreparationSource, manifests: Mapping[str, CorpusManifest]) -> None:
    """Raise ConfigError, and remove the jobs, if a directory would have no document."""
    counts = {name: manifest.totals["documents"] for name, manifest in manifests.items()}
    for name, count in counts.items():
        if not count:
            shutil.rmtree(source.work_dir)
            raise ConfigError(
                f"{source.directory}: heldout={source.settings.heldout} leaves no {name} document "
                f"of {sum(counts.values()):,}; choose another heldout=, or omit it"
            )


def _select_documents(
    source: PreparationSource,
    job_dirs: Sequence[Path],
    receipts: Sequence[JobReceipt],
    num_workers: int,
) -> tuple[dict[str, list[Path]], Selection]:
    """Return the directories of the selected shards by the name of their target."""
    key = hashlib.sha256("".join(path.name for path in job_dirs).encode()).hexdigest()[:12]
    selection = document_selection.select_documents(
        source.work_dir / f"selection-{key}", job_dirs, source.settings
    )
    jobs: dict[str, list[SelectionJob]] = {
        name: [
            SelectionJob(
                job_dir,
                codes,
                document_selection.CODES[TRAIN if source.settings.heldout is None else name],
                source.work_dir / f"{job_dir.name}-{key}-{name}",
                sum(shard.text_bytes for shard in receipt.parts),
            )
            for job_dir, codes, receipt in zip(
                job_dirs, selection.code_files, receipts, strict=True
            )
        ]
        for name in source.targets
    }
    all_jobs = [job for some in jobs.values() for job in some]
    unfinished = [job for job in all_jobs if conversion_job.load_receipt(job.output_dir) is None]
    num_bytes = sum(job.num_bytes for job in all_jobs)
    num_done = num_bytes - sum(job.num_bytes for job in unfinished)
    with closing(ProgressBar(f"selecting {source.directory}", num_bytes, num_done)) as progress:
        run_job = document_selection.run_selection_job
        num_workers = job_pool.limit_workers(num_workers, num_bytes)
        for _ in job_pool.run_jobs(run_job, unfinished, num_workers, progress):
            pass
    return {name: [job.output_dir for job in some] for name, some in jobs.items()}, selection


def _write_removed_samples(
    source: PreparationSource, receipts: Sequence[JobReceipt], selection: Selection | None
) -> None:
    """Write beginnings of removed documents for the report, if there are any."""
    samples: dict[str, list[str]] = {}
    for receipt in receipts:
        for name, texts in receipt.removed_samples.items():
            samples.setdefault(name, []).extend(texts)
    duplicates = selection.duplicates if selection else []
    if samples or duplicates:
        directory = source.directory / REPORT_DIR
        durable_files.make_directory(directory)
        write_json(directory / REMOVED_FILE, {"filters": samples, "duplicates": duplicates})


def _number_shards(
    source: PreparationSource, target: Path, job_dirs: Iterable[Path]
) -> tuple[tuple[ShardRecord, ...], tuple[IndexRecord, ...], dict[str, str]]:
    """Return the shards and indices of a directory, and the old and new name of each file.

    The names in the records are relative to `target`, the others to the directory of the source.
    """
    shards: list[ShardRecord] = []
    indices: list[IndexRecord] = []
    moves: dict[str, str] = {}
    prefix = target.relative_to(source.directory)
    for job_dir, receipt in zip(job_dirs, _load_receipts(job_dirs), strict=True):
        names = {}
        for shard in receipt.parts:
            names[shard.name] = arrow_shards.format_shard_name(len(shards))
            shards.append(replace(shard, name=names[shard.name]))
        for index in receipt.indices:
            shard_name = next(name for name in names if index.name.startswith(name))
            names[index.name] = names[shard_name] + index.name.removeprefix(shard_name)
            indices.append(replace(index, name=names[index.name]))
        relative = job_dir.relative_to(source.directory)
        moves |= {str(relative / old): str(prefix / new) for old, new in names.items()}
    return tuple(shards), tuple(indices), moves


def undo_moves(source: PreparationSource) -> None:
    """Restore the names of files after an attempt that was killed before it wrote the manifest.

    Raises:
        ConfigError: If a recorded name is outside of the directory.
    """
    path = source.work_dir / _MOVES_FILE
    if not path.is_file():
        return
    moves = corpus_manifest.load_work_file(path)
    root = source.directory.resolve()
    for name in (*moves, *moves.values()):
        if not isinstance(name, str) or not (root / name).resolve().is_relative_to(root):
            raise ConfigError(f"{path} names {name}, which is outside of {source.directory}")
    for directory in source.targets.values():
        (directory / corpus_manifest.MANIFEST_FILE).unlink(missing_ok=True)
    for old, new in moves.items():
        if (source.directory / new).is_file():
            os.replace(source.directory / new, source.directory / old)
    durable_files.fsync_directory(source.directory)
    path.unlink()
