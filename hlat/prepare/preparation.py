"""Preparation of directories from input files: parallel, resumable and deterministic.

Converting a corpus takes hours on machines that may be killed. Work is divided by the inputs alone,
finished jobs are stored in a hidden directory, and the shards get their final names when all jobs
are finished. The result depends neither on the number of workers nor on interruptions.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from hlat.config.config_errors import ConfigError
from hlat.prepare import arrow_shards, conversion_job, corpus_layouts, corpus_manifest, job_pool
from hlat.prepare.arrow_shards import ShardRecord
from hlat.prepare.conversion_job import ConversionJob, JobReceipt
from hlat.prepare.corpus_manifest import CorpusManifest, IndexRecord, write_json
from hlat.storage import durable_files
from hlat.storage.data_file import DataFile
from hlat.storage.progress_bar import ProgressBar, format_bytes

_SETTINGS_FILE = "settings.json"
_MOVES_FILE = "moves.json"


@dataclass(frozen=True)
class PreparationSource:
    """Inputs of one prepared directory."""

    name: str
    directory: Path
    inputs: tuple[DataFile, ...]
    column: str
    layout: str | None
    skipped: tuple[tuple[str, int], ...] = ()
    """Number of files without documents beside the inputs, by suffix."""

    @property
    def work_dir(self) -> Path:
        """Directory of finished jobs until all are finished."""
        return self.directory / corpus_manifest.WORK_DIR

    def to_settings(self) -> dict[str, Any]:
        """Return the command-line settings that every attempt must repeat."""
        paths = [file.location for file in self.inputs]
        return {"text_column": self.column, "layout": self.layout, "INPUT": paths}


def prepare_sources(
    sources: Sequence[PreparationSource],
    num_workers: int,
    skip_damaged: bool,
    print_line: Callable[[str], None],
) -> dict[str, CorpusManifest]:
    """Prepare the directory of each source unless it is complete.

    Call `print_line` with a line for each complete source; return the manifests by name. Finished
    jobs are kept if an exception is raised.

    Raises:
        ConfigError: If an input cannot be read or is damaged, or a directory has other contents.
        OSError: If writing fails.
    """
    manifests = {}
    with ExitStack() as stack:
        unfinished = []
        for source in sources:
            manifest = _load_complete_manifest(source)
            if manifest is None:
                stack.enter_context(_lock_work_dir(source))
                unfinished.append(source)
            else:
                manifests[source.name] = manifest
                print_line(f"{source.directory}: is complete already; {format_summary(manifest)}")
        for source, manifest in _convert_sources(unfinished, num_workers, skip_damaged):
            manifests[source.name] = manifest
            print_line(f"{source.directory}: {format_summary(manifest)}")
    return manifests


def plan_sources(
    output_dir: Path,
    inputs: Sequence[DataFile],
    column: str,
    layout: str | None,
    skipped: Mapping[str, int] = MappingProxyType({}),
) -> tuple[list[PreparationSource], list[str]]:
    """Return the sources to prepare, and notes on missing and unmatched files of a layout.

    `skipped` is recorded in the manifest of a source without layout.

    Raises:
        ConfigError: If no input matches the layout, or the directory was prepared as a single
            source instead of several, or vice versa.
    """
    prepared = corpus_manifest.find_prepared_dirs(output_dir)
    if layout is None:
        children = [path for path in prepared if path != output_dir]
        if children:
            raise ConfigError(
                f"{output_dir}: contains prepared sources, such as {children[0].name}; choose "
                "another output= for a source without layout="
            )
        counts = tuple(sorted(skipped.items()))
        name = output_dir.name
        return [PreparationSource(name, output_dir, tuple(inputs), column, None, counts)], []
    if output_dir in prepared:
        raise ConfigError(
            f"{output_dir}: is a prepared source itself; choose another output= for layout={layout}"
        )
    assigned, unmatched = corpus_layouts.assign_sources(layout, inputs)
    sources = [
        PreparationSource(name, output_dir / name, tuple(files), column, layout)
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


def format_train_command(output_dir: Path, layout: str | None) -> str:
    """Return the command that trains on a prepared directory."""
    overrides = f"data=files data.sources.files.paths=[{output_dir}]"
    if layout is not None:
        overrides = f"data={corpus_layouts.LAYOUTS[layout].config} data.root={output_dir}"
    return f"hlat train {overrides}"


def format_summary(manifest: CorpusManifest) -> str:
    """Return documents, size and omitted documents of a directory in one line."""
    totals = manifest.totals
    omitted = [f", {totals[key]:,} {key} omitted" for key in ("empty", "damaged") if totals[key]]
    size = format_bytes(totals["text_bytes"])
    return f"{totals['documents']:,} documents, {size}{''.join(omitted)}"


def _load_complete_manifest(source: PreparationSource) -> CorpusManifest | None:
    """Return the manifest of a complete directory.

    Raises:
        ConfigError: If it was prepared from other inputs, or contains other Arrow files.
    """
    manifest = corpus_manifest.load_corpus_manifest(source.directory)
    if manifest is None:
        if not source.work_dir.is_dir() and any(source.directory.glob("*.arrow")):
            raise ConfigError(
                f"{source.directory}: contains Arrow files that hlat prepare did not write; choose "
                "another output=, or move them away"
            )
        return None
    paths = [record.path for record in manifest.inputs]
    previous = {"text_column": manifest.input_column, "layout": manifest.layout, "INPUT": paths}
    _validate_settings(source, previous)
    changed = [
        f"{source.directory}: was prepared from {record.path} when it had {record.bytes:,} bytes; "
        f"it was modified since and has {file.num_bytes:,}; choose another output=, or delete the "
        "directory"
        for record, file in zip(manifest.inputs, source.inputs, strict=True)
        if (file.num_bytes, file.version) != (record.bytes, record.version)
    ]
    if changed:
        raise ConfigError(*changed)
    shutil.rmtree(source.work_dir, ignore_errors=True)  # left by a kill after the manifest
    return manifest


def _validate_settings(source: PreparationSource, previous: dict[str, Any]) -> None:
    """Raise ConfigError if a directory was started with other settings."""
    problems = []
    for name, now in source.to_settings().items():
        then = previous.get(name, [])
        if now == then:
            continue
        if name == "INPUT":
            before, after = then, now
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
) -> Iterator[tuple[PreparationSource, CorpusManifest]]:
    """Run the unfinished jobs, the largest first, and complete each source after its last job."""
    split = conversion_job.split_into_jobs
    jobs = {one: [*split(one.work_dir, one.inputs, one.column, skip_damaged)] for one in sources}
    remaining = {one: [job for job in jobs[one] if not _is_finished(job)] for one in sources}
    for source in sources:
        if not remaining[source]:
            yield source, _complete_source(source, jobs[source])
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
                yield source, _complete_source(source, jobs[source])


def _is_finished(job: ConversionJob) -> bool:
    """Return True if the shards exist, without omitted damaged documents unless allowed."""
    receipt = conversion_job.load_receipt(job)
    if receipt is None:
        return False
    if job.skip_damaged or not any(record.damaged for record in receipt.inputs):
        return True
    shutil.rmtree(job.output_dir)
    return False


def _complete_source(source: PreparationSource, jobs: Sequence[ConversionJob]) -> CorpusManifest:
    """Rename the shards of all jobs and write the manifest."""
    receipts = [conversion_job.load_receipt(job) for job in jobs]
    manifest, moves = _build_manifest(source, jobs, [one for one in receipts if one is not None])
    if not manifest.totals["documents"]:
        raise ConfigError(
            f"{source.directory}: its inputs contain no document ({manifest.totals['empty']:,} "
            f"empty, {manifest.totals['damaged']:,} damaged); check text_column={source.column}"
        )
    write_json(source.work_dir / _MOVES_FILE, moves)
    for old, new in moves.items():
        os.replace(source.directory / old, source.directory / new)
    durable_files.fsync_directory(source.directory)
    corpus_manifest.write_corpus_manifest(source.directory, manifest)
    shutil.rmtree(source.work_dir)
    return manifest


def _build_manifest(
    source: PreparationSource, jobs: Sequence[ConversionJob], receipts: Sequence[JobReceipt]
) -> tuple[CorpusManifest, dict[str, str]]:
    """Return the manifest, and the old and new name of each file relative to the directory."""
    shards: list[ShardRecord] = []
    indices: list[IndexRecord] = []
    moves: dict[str, str] = {}
    for job, receipt in zip(jobs, receipts, strict=True):
        names = {}
        for shard in receipt.parts:
            names[shard.name] = arrow_shards.format_shard_name(len(shards))
            shards.append(replace(shard, name=names[shard.name]))
        for index in receipt.indices:
            shard_name = next(name for name in names if index.name.startswith(name))
            names[index.name] = names[shard_name] + index.name.removeprefix(shard_name)
            indices.append(replace(index, name=names[index.name]))
        job_dir = job.output_dir.relative_to(source.directory)
        moves |= {str(job_dir / old): new for old, new in names.items()}
    manifest = CorpusManifest(
        source=source.name,
        layout=source.layout,
        input_column=source.column,
        files=tuple(shards),
        indices=tuple(indices),
        inputs=tuple(record for receipt in receipts for record in receipt.inputs),
        skipped=dict(source.skipped),
    )
    return manifest, moves


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
    for old, new in moves.items():
        if (source.directory / new).is_file():
            os.replace(source.directory / new, source.directory / old)
    durable_files.fsync_directory(source.directory)
    path.unlink()
