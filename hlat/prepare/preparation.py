"""Preparation of directories from input files: parallel, resumable and deterministic.

Converting a corpus takes hours on machines that may be killed. Work is divided by the inputs alone,
finished jobs are stored in a hidden directory, and the shards get their final names when all jobs
are finished. The result depends neither on the number of workers nor on interruptions.
"""

import fcntl
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from hlat.config.config_errors import ConfigError
from hlat.prepare import (
    arrow_shards,
    conversion_job,
    corpus_layouts,
    corpus_manifest,
    document_selection,
    job_pool,
)
from hlat.prepare.arrow_shards import ShardRecord
from hlat.prepare.conversion_job import ConversionJob, JobReceipt
from hlat.prepare.corpus_manifest import CorpusManifest, IndexRecord, InputRecord, write_json
from hlat.prepare.document_selection import Selection, SelectionJob
from hlat.prepare.document_settings import HELDOUT, TRAIN, DocumentSettings
from hlat.storage import durable_files
from hlat.storage.data_file import DataFile
from hlat.storage.progress_bar import ProgressBar, format_bytes

REPORT_DIR = ".report"
"""Directory of intermediate results of the report, hidden as `WORK_DIR` is."""
REMOVED_FILE = "removed.json"
"""File in `REPORT_DIR` with samples of removed documents."""
_SETTINGS_FILE = "settings.json"
_MOVES_FILE = "moves.json"


@dataclass(frozen=True)
class PreparationSource:
    """Inputs of one prepared directory, or of one for training and one for held-out documents."""

    name: str
    directory: Path
    inputs: tuple[DataFile, ...]
    column: str
    layout: str | None
    skipped: tuple[tuple[str, int], ...] = ()
    """Number of files without documents beside the inputs, by suffix."""
    settings: DocumentSettings = field(default_factory=DocumentSettings)

    @property
    def work_dir(self) -> Path:
        """Directory of finished jobs until all are finished."""
        return self.directory / corpus_manifest.WORK_DIR

    @property
    def targets(self) -> dict[str, Path]:
        """Directories with a manifest, by the name of their source."""
        if self.settings.heldout is None:
            return {self.name: self.directory}
        return {name: self.directory / name for name in (TRAIN, HELDOUT)}

    def to_settings(self) -> dict[str, Any]:
        """Return the command-line settings that every attempt must repeat."""
        paths = [file.location for file in self.inputs]
        settings = self.settings.to_json()
        return {"text_column": self.column, "layout": self.layout, "INPUT": paths, **settings}


def prepare_sources(
    sources: Sequence[PreparationSource],
    num_workers: int,
    skip_damaged: bool,
    print_line: Callable[[str], None],
) -> dict[str, CorpusManifest]:
    """Prepare the directory of each source unless it is complete.

    Call `print_line` with a line for each complete directory; return the manifests by the name of
    their source. Finished jobs are kept if an exception is raised.

    Raises:
        ConfigError: If an input cannot be read or is damaged, or a directory has other contents.
        OSError: If writing fails.
    """
    manifests: dict[str, CorpusManifest] = {}
    with ExitStack() as stack:
        unfinished = []
        for source in sources:
            complete = _load_complete_manifests(source)
            if complete is None:
                stack.enter_context(_lock_work_dir(source))
                unfinished.append(source)
            for name, manifest in (complete or {}).items():
                manifests[name] = manifest
                print_line(
                    f"{source.targets[name]}: is complete already; {format_summary(manifest)}"
                )
        for source, new in _convert_sources(unfinished, num_workers, skip_damaged):
            for name, manifest in new.items():
                manifests[name] = manifest
                print_line(f"{source.targets[name]}: {format_summary(manifest)}")
    return manifests


def plan_sources(
    output_dir: Path,
    inputs: Sequence[DataFile],
    column: str,
    layout: str | None,
    skipped: Mapping[str, int] = MappingProxyType({}),
    settings: DocumentSettings | None = None,
) -> tuple[list[PreparationSource], list[str]]:
    """Return the sources to prepare, and notes on missing and unmatched files of a layout.

    `skipped` is recorded in the manifest of a source without layout.

    Raises:
        ConfigError: If no input matches the layout, or the directory was prepared as a single
            source instead of several, or vice versa.
    """
    settings = settings or DocumentSettings()
    prepared = corpus_manifest.find_prepared_dirs(output_dir)
    if layout is None:
        own_names = () if settings.heldout is None else (TRAIN, HELDOUT)
        children = [path for path in prepared if path != output_dir and path.name not in own_names]
        if children:
            raise ConfigError(
                f"{output_dir}: contains prepared sources, such as {children[0].name}; choose "
                "another output= for a source without layout="
            )
        if settings.heldout is not None and (output_dir / corpus_manifest.MANIFEST_FILE).is_file():
            raise ConfigError(
                f"{output_dir}: was prepared without heldout=; choose another output=, or delete "
                "the directory"
            )
        counts, files = tuple(sorted(skipped.items())), tuple(inputs)
        name = output_dir.name
        return [PreparationSource(name, output_dir, files, column, None, counts, settings)], []
    if output_dir in prepared:
        raise ConfigError(
            f"{output_dir}: is a prepared source itself; choose another output= for layout={layout}"
        )
    assigned, unmatched = corpus_layouts.assign_sources(layout, inputs)
    sources = [
        PreparationSource(name, output_dir / name, tuple(files), column, layout, (), settings)
        for name, files in assigned.items()
    ]
    patterns = corpus_layouts.LAYOUTS[layout].sources
    notes = [
        f"{name}: there is no file {' or '.join(patterns[name])}"
        for name in patterns
        if name not in assigned
    ]
    if unmatched:
        notes.append(
            f"{len(unmatched)} files are of no source of {layout}, such as {unmatched[0].location}"
        )
    return sources, notes


def format_summary(manifest: CorpusManifest) -> str:
    """Return documents, size and omitted documents of a directory in one line."""
    totals = manifest.totals
    omitted = [f", {totals[key]:,} {key} omitted" for key in ("empty", "damaged") if totals[key]]
    size = format_bytes(totals["text_bytes"])
    return f"{totals['documents']:,} documents, {size}{''.join(omitted)}"


def _load_complete_manifests(source: PreparationSource) -> dict[str, CorpusManifest] | None:
    """Return the manifests of complete directories.

    Raises:
        ConfigError: If one was prepared from other inputs, or contains other Arrow files.
    """
    manifests = {}
    for name, directory in source.targets.items():
        manifest = corpus_manifest.load_corpus_manifest(directory)
        if manifest is not None:
            _validate_manifest(source, manifest)
            manifests[name] = manifest
        elif not source.work_dir.is_dir() and any(directory.glob("*.arrow")):
            raise ConfigError(
                f"{directory}: contains Arrow files that hlat prepare did not write; choose "
                "another output=, or move them away"
            )
    if len(manifests) < len(source.targets):
        return None
    shutil.rmtree(source.work_dir, ignore_errors=True)  # left by a kill after the manifest
    return manifests


def _validate_manifest(source: PreparationSource, manifest: CorpusManifest) -> None:
    """Raise ConfigError if a directory was prepared with other settings or inputs."""
    paths = [record.path for record in manifest.inputs]
    previous = {"text_column": manifest.input_column, "layout": manifest.layout, "INPUT": paths}
    _validate_settings(source, previous | manifest.settings)
    changed = [
        f"{source.directory}: was prepared from {record.path} when it had {record.bytes:,} bytes; "
        f"it was modified since and has {file.num_bytes:,}; choose another output=, or delete the "
        "directory"
        for record, file in zip(manifest.inputs, source.inputs, strict=True)
        if (file.num_bytes, file.version) != (record.bytes, record.version)
    ]
    if changed:
        raise ConfigError(*changed)


def _validate_settings(source: PreparationSource, previous: dict[str, Any]) -> None:
    """Raise ConfigError if a directory was started with other settings."""
    problems = []
    settings = source.to_settings()
    for name in settings | previous:
        now, then = settings.get(name), previous.get(name)
        if now == then:
            continue
        if name == "INPUT":
            before, after = then or [], now or []
            then, now = _format_difference(before, after), _format_difference(after, before)
        problems.append(
            f"{source.directory}: was started with {name} {then or 'not given'}, not with "
            f"{now or 'not given'}; choose another output=, or delete the directory"
        )
    if problems:
        raise ConfigError(*problems)


def _format_difference(inputs: list[str], others: list[str]) -> str:
    """Describe a list of inputs by those that are missing in another list."""
    extra = sorted(set(inputs) - set(others))
    more = f" and {len(extra) - 2} more" if len(extra) > 2 else ""
    among = f" (among them {', '.join(extra[:2])}{more})" if extra else ""
    return f"of {len(inputs)} files{among}"


@contextmanager
def _lock_work_dir(source: PreparationSource) -> Iterator[None]:
    """Create and lock the work directory and remove unfinished jobs of earlier attempts."""
    try:
        durable_files.make_directory(source.work_dir)
    except OSError as error:
        raise ConfigError(
            f"{source.directory}: cannot be created ({error.strerror}); choose another output="
        ) from error
    with (source.work_dir / "lock").open("w") as lock:
        _acquire_lock(source, lock)
        settings = source.work_dir / _SETTINGS_FILE
        receipts = f"*/{conversion_job.RECEIPT_FILE}"
        if settings.is_file() and any(source.work_dir.glob(receipts)):
            _validate_settings(source, corpus_manifest.load_work_file(settings))
        write_json(settings, source.to_settings())
        _undo_moves(source)
        _remove_unfinished_jobs(source)
        try:
            yield
        finally:
            _remove_unfinished_jobs(source)
            if source.work_dir.is_dir() and not any(source.work_dir.glob(receipts)):
                shutil.rmtree(source.work_dir)


def _acquire_lock(source: PreparationSource, file: TextIO) -> None:
    """Lock a directory until the file is closed or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{source.directory}: is being prepared by another process; wait for it, or stop it"
        ) from error
    except OSError:
        return  # the file system does not support locks


def _remove_unfinished_jobs(source: PreparationSource) -> None:
    for directory in source.work_dir.glob(f"{conversion_job.TEMPORARY_PREFIX}*"):
        shutil.rmtree(directory)


def _convert_sources(
    sources: Sequence[PreparationSource], num_workers: int, skip_damaged: bool
) -> Iterator[tuple[PreparationSource, dict[str, CorpusManifest]]]:
    """Run the unfinished jobs, the largest first, and complete each source after its last job."""
    split = conversion_job.split_into_jobs
    jobs = {
        one: [*split(one.work_dir, one.inputs, one.column, skip_damaged, one.settings)]
        for one in sources
    }
    remaining = {one: [job for job in jobs[one] if not _is_finished(job)] for one in sources}
    for source in sources:
        if not remaining[source]:
            yield source, _complete_source(source, jobs[source], num_workers)
    unfinished = [job for some in remaining.values() for job in some]
    if not unfinished:
        return
    unfinished.sort(key=lambda job: -job.num_bytes)
    num_bytes = sum(job.num_bytes for some in jobs.values() for job in some)
    num_done = num_bytes - sum(job.num_bytes for job in unfinished)
    directory = sources[0].directory if len(sources) == 1 else sources[0].directory.parent
    run_job = conversion_job.run_conversion_job
    with closing(ProgressBar(f"preparing {directory}", num_bytes, num_done)) as progress:
        for job in job_pool.run_jobs(run_job, unfinished, num_workers, progress):
            source = next(one for one in sources if one.work_dir == job.work_dir)
            remaining[source].remove(job)
            if not remaining[source]:
                yield source, _complete_source(source, jobs[source], num_workers)


def _is_finished(job: ConversionJob) -> bool:
    """Return True if the shards exist, without omitted damaged documents unless allowed."""
    receipt = conversion_job.load_receipt(job.output_dir)
    if receipt is None:
        return False
    if job.skip_damaged or not any(record.damaged for record in receipt.inputs):
        return True
    shutil.rmtree(job.output_dir)
    return False


def _complete_source(
    source: PreparationSource, jobs: Sequence[ConversionJob], num_workers: int
) -> dict[str, CorpusManifest]:
    """Select documents if necessary, rename the shards of all jobs, and write the manifests."""
    job_dirs = [job.output_dir for job in jobs]
    receipts = _load_receipts(job_dirs)
    removed: Counter[str] = Counter()
    for receipt in receipts:
        removed.update(receipt.removed)
    inputs = tuple(record for receipt in receipts for record in receipt.inputs)
    if not any(record.documents for record in inputs):
        raise _build_no_documents_error(source, inputs, removed)
    shard_dirs, selection = {source.name: job_dirs}, None
    if source.settings.needs_signatures:
        shard_dirs, selection = _select_documents(source, job_dirs, receipts, num_workers)
        removed.update(selection.removed)
    manifests: dict[str, CorpusManifest] = {}
    moves: dict[str, str] = {}
    for name, directories in shard_dirs.items():
        files, indices, renamed = _number_shards(source, source.targets[name], directories)
        moves |= renamed
        manifests[name] = CorpusManifest(
            source=name,
            layout=source.layout,
            input_column=source.column,
            files=files,
            indices=indices,
            inputs=inputs,
            skipped=dict(source.skipped),
            settings=source.settings.to_json(),
            removed=dict(removed),
        )
    _validate_targets(source, manifests)
    _write_removed_samples(source, receipts, selection)
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
    return manifests


def _load_receipts(job_dirs: Iterable[Path]) -> list[JobReceipt]:
    receipts = map(conversion_job.load_receipt, job_dirs)
    return [receipt for receipt in receipts if receipt is not None]


def _build_no_documents_error(
    source: PreparationSource, inputs: Iterable[InputRecord], removed: Mapping[str, int]
) -> ConfigError:
    """Return the error for inputs without a document after all filters, and remove the jobs."""
    shutil.rmtree(source.work_dir)
    counts = {
        "empty": sum(record.empty for record in inputs),
        "damaged": sum(record.damaged for record in inputs),
        **{f"removed by {name}": count for name, count in removed.items()},
    }
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    settings = "the filters" if removed else f"text_column={source.column}"
    return ConfigError(
        f"{source.directory}: its inputs contain no document ({listed}); check {settings}"
    )


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


def _undo_moves(source: PreparationSource) -> None:
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
