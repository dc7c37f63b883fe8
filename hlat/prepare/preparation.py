"""Preparation of directories from input files: parallel, resumable and deterministic.

Converting a corpus takes hours on machines that may be killed. Work is divided by the inputs alone,
finished jobs are stored in a hidden directory, and the shards get their final names when all jobs
are finished. The result depends neither on the number of workers nor on interruptions.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TextIO

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.prepare import conversion_job, corpus_manifest, job_pool
from hlat.prepare.conversion_job import ConversionJob
from hlat.prepare.corpus_manifest import CorpusManifest, write_json
from hlat.prepare.preparation_output import SETTINGS_FILE, complete_source, undo_moves
from hlat.prepare.preparation_source import PreparationSource
from hlat.storage import durable_files
from hlat.storage.progress_bar import ProgressBar, format_bytes


def prepare_sources(
    sources: Sequence[PreparationSource],
    num_workers: int,
    skip_damaged: bool,
    print_line: Callable[[str], None],
    max_lost: float | None = None,
) -> dict[str, CorpusManifest]:
    """Prepare the directory of each source unless it is complete.

    Call `print_line` with a line for each complete directory; return the manifests by the name of
    their source. Finished jobs are kept if an exception is raised.

    Raises:
        ConfigError: If an input cannot be read or is damaged, more text is lost than `max_lost`
            allows, or a directory has other contents.
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
        for source, new in _convert_sources(unfinished, num_workers, skip_damaged, max_lost):
            for name, manifest in new.items():
                manifests[name] = manifest
                print_line(f"{source.targets[name]}: {format_summary(manifest)}")
    return manifests


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
    raise_config_errors(changed)


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
    raise_config_errors(problems)


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
        settings = source.work_dir / SETTINGS_FILE
        receipts = f"*/{conversion_job.RECEIPT_FILE}"
        if settings.is_file() and any(source.work_dir.glob(receipts)):
            _validate_settings(source, corpus_manifest.load_work_file(settings))
        write_json(settings, source.to_settings())
        undo_moves(source)
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
    sources: Sequence[PreparationSource],
    num_workers: int,
    skip_damaged: bool,
    max_lost: float | None,
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
            yield source, complete_source(source, jobs[source], num_workers, max_lost)
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
                yield source, complete_source(source, jobs[source], num_workers, max_lost)


def _is_finished(job: ConversionJob) -> bool:
    """Return True if the shards exist, without omitted damaged documents unless allowed."""
    receipt = conversion_job.load_receipt(job.output_dir)
    if receipt is None:
        return False
    if job.skip_damaged or not any(record.damaged for record in receipt.inputs):
        return True
    shutil.rmtree(job.output_dir)
    return False
