"""Prepared folders from inputs: planned, converted in parallel, completed, and gone on with.

Converting a corpus takes hours on machines that are killed, and people start the same command
again. So the work is cut by the inputs alone, finished jobs wait in a hidden folder, and the parts
get their names when all are there. What comes out depends neither on the number of workers nor on
how often it was interrupted.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from hlat.checkpoint import durable
from hlat.config.errors import ConfigError
from hlat.data.preparation import conversion, job_pool, layouts, prepared, shards
from hlat.data.preparation.conversion import Job, Receipt
from hlat.data.preparation.inputs import Input
from hlat.data.preparation.prepared import IndexRecord, Manifest, write_json
from hlat.data.preparation.progress import Progress, format_bytes
from hlat.data.preparation.shards import Part

_SETTINGS = "settings.json"
_MOVES = "moves.json"


@dataclass(frozen=True)
class Source:
    """What becomes one prepared folder."""

    name: str
    folder: Path
    inputs: tuple[Input, ...]
    column: str
    layout: str | None

    @property
    def work(self) -> Path:
        """Where finished jobs wait for the others."""
        return self.folder / prepared.WORK

    def settings(self) -> dict[str, Any]:
        """What every attempt at this folder must agree on, by the word of the command line."""
        return {
            "--text-column": self.column,
            "--layout": self.layout,
            "INPUT": [one.path for one in self.inputs],
        }


def prepare(
    sources: Sequence[Source],
    num_workers: int,
    skip_damaged: bool,
    tell: Callable[[str], None],
) -> dict[str, Manifest]:
    """Prepare the folder of each source, unless it is complete.

    Args:
        sources: Each with a folder of its own.
        num_workers: Processes at most.
        skip_damaged: Leave damaged documents out and count them, instead of stopping.
        tell: Told a line about every source that is complete.

    Returns:
        The manifest of each source by its name.

    Raises:
        ConfigError: If an input cannot be read or is damaged, or a folder holds something else.
        OSError: If a folder cannot be written.
        KeyboardInterrupt: The user's; what is finished is kept.
    """
    manifests = {}
    with ExitStack() as stack:
        unfinished = []
        for source in sources:
            manifest = _find_complete(source)
            if manifest is None:
                stack.enter_context(_begin(source))
                unfinished.append(source)
            else:
                manifests[source.name] = manifest
                tell(f"{source.folder}: is complete already; {describe(manifest)}")
        for source, manifest in _convert(unfinished, num_workers, skip_damaged):
            manifests[source.name] = manifest
            tell(f"{source.folder}: {describe(manifest)}")
    return manifests


def plan(
    output: Path, inputs: Sequence[Input], column: str, layout: str | None
) -> tuple[list[Source], list[str]]:
    """The sources that inputs become, and a line about each thing that a layout leaves open.

    Raises:
        ConfigError: If no input fits the layout, or the folder was prepared with another idea of
            what lies in it.
    """
    if layout is None:
        inside = [one for one in prepared.find_begun(output) if one != output]
        if inside:
            raise ConfigError(
                f"{output}: holds prepared sources, such as {inside[0].name}; choose another "
                "--output for one that has no --layout"
            )
        return [Source(output.name, output, tuple(inputs), column, None)], []
    if output in prepared.find_begun(output):
        raise ConfigError(
            f"{output}: is a prepared source itself; choose another --output for --layout {layout}"
        )
    given, rest = layouts.assign(layout, inputs)
    sources = [
        Source(name, output / name, tuple(files), column, layout) for name, files in given.items()
    ]
    patterns = layouts.LAYOUTS[layout].sources
    notes = [
        f"{name}: there is no file {' or '.join(patterns[name])}"
        for name in patterns
        if name not in given
    ]
    if rest:
        notes.append(f"{len(rest)} files are of no source of {layout}, such as {rest[0].path}")
    return sources, notes


def command(output: Path, layout: str | None) -> str:
    """The command that trains on what was prepared."""
    config = f"data=files data.sources.files.paths=[{output}]"
    if layout is not None:
        config = f"data={layouts.LAYOUTS[layout].config} data.root={output}"
    return f"python -m hlat.train {config}"


def describe(manifest: Manifest) -> str:
    """What a folder holds, in a line."""
    left_out = {"empty": manifest.empty, "damaged": manifest.damaged}
    notes = [f", {count:,} {word} left out" for word, count in left_out.items() if count]
    size = format_bytes(manifest.text_bytes)
    return f"{manifest.documents:,} documents, {size}{''.join(notes)}"


def _find_complete(source: Source) -> Manifest | None:
    """The manifest of a folder that is complete.

    Raises:
        ConfigError: If it was made from something else, or holds files of somebody else.
    """
    manifest = prepared.read_manifest(source.folder)
    if manifest is None:
        if not source.work.is_dir() and any(source.folder.glob("*.arrow")):
            raise ConfigError(
                f"{source.folder}: holds Arrow files that hlat.prepare did not write; choose "
                "another --output, or move them away"
            )
        return None
    was = {
        "--text-column": manifest.input_column,
        "--layout": manifest.layout,
        "INPUT": [one.path for one in manifest.inputs],
    }
    _compare(source, was)
    then = {one.path: one for one in manifest.inputs}
    changed = [
        f"{source.folder}: was prepared from {one.path} when it had {then[one.path].bytes:,} "
        f"bytes; it has been written again since and has {one.bytes:,}; choose another --output, "
        "or delete the folder"
        for one in source.inputs
        if (one.bytes, one.version) != (then[one.path].bytes, then[one.path].version)
    ]
    if changed:
        raise ConfigError(*changed)
    shutil.rmtree(source.work, ignore_errors=True)  # a kill came between manifest and cleaning up
    return manifest


def _compare(source: Source, was: dict[str, Any]) -> None:
    """Refuse other settings than those a folder was begun with."""
    problems = []
    for word, now in source.settings().items():
        if now == was[word]:
            continue
        then = was[word]
        then, now = (_only(then, now), _only(now, then)) if word == "INPUT" else (then, now)
        problems.append(
            f"{source.folder}: was begun with {word} {then or 'not given'}, not with "
            f"{now or 'not given'}; choose another --output, or delete the folder"
        )
    if problems:
        raise ConfigError(*problems)


def _only(some: list[str], others: list[str]) -> str:
    """A list of inputs by what it has and another has not."""
    own = sorted(set(some) - set(others))
    more = f" and {len(own) - 2} more" if len(own) > 2 else ""
    among = f" (among them {', '.join(own[:2])}{more})" if own else ""
    return f"of {len(some)} files{among}"


@contextmanager
def _begin(source: Source) -> Iterator[None]:
    """Hold a folder for this process, cleared of what earlier attempts have not finished."""
    try:
        durable.make_folder(source.work)
    except OSError as error:
        raise ConfigError(
            f"{source.folder}: cannot be made ({error.strerror}); choose another --output"
        ) from error
    with (source.work / "lock").open("w") as lock:
        _lock(source, lock)
        settings = source.work / _SETTINGS
        if settings.is_file() and _has_finished_jobs(source):
            _compare(source, json.loads(settings.read_bytes()))
        write_json(settings, source.settings())
        _undo_moves(source)
        _clear(source)
        try:
            yield
        finally:
            _clear(source)
            if source.work.is_dir() and not _has_finished_jobs(source):
                shutil.rmtree(source.work)


def _lock(source: Source, file: TextIO) -> None:
    """Lock a folder until the file is closed, or the process dies."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{source.folder}: is being prepared by another process; wait for it, or stop it"
        ) from error
    except OSError:
        return  # this file system has no locks


def _clear(source: Source) -> None:
    """Remove what jobs that were killed have left."""
    for folder in source.work.glob(f"{conversion.TEMPORARY}*"):
        shutil.rmtree(folder)


def _has_finished_jobs(source: Source) -> bool:
    return any(source.work.glob(f"*/{conversion.RECEIPT}"))


def _convert(
    sources: Sequence[Source], num_workers: int, skip_damaged: bool
) -> Iterator[tuple[Source, Manifest]]:
    """Do the jobs that are left, the largest first, and complete each source after its last."""
    jobs = {one: list(_cut(one, skip_damaged)) for one in sources}
    left = {one: [job for job in jobs[one] if not _is_done(job)] for one in sources}
    for source in sources:
        if not left[source]:
            yield source, _complete(source, jobs[source])
    todo = sorted((job for some in left.values() for job in some), key=lambda job: -job.num_bytes)
    if not todo:
        return
    total = sum(job.num_bytes for some in jobs.values() for job in some)
    done = total - sum(job.num_bytes for job in todo)
    progress = Progress(f"preparing {_common_folder(sources)}", total, done)
    try:
        for job in job_pool.run(conversion.convert, todo, num_workers, progress):
            source = next(one for one in sources if one.work == job.work)
            left[source].remove(job)
            if not left[source]:
                yield source, _complete(source, jobs[source])
    finally:
        progress.close()


def _common_folder(sources: Sequence[Source]) -> Path:
    folders = [source.folder for source in sources]
    return folders[0] if len(folders) == 1 else folders[0].parent


def _cut(source: Source, skip_damaged: bool) -> Iterator[Job]:
    return conversion.cut(source.work, source.inputs, source.column, skip_damaged)


def _is_done(job: Job) -> bool:
    """Whether a job's parts are there; without damaged documents, unless these are allowed."""
    receipt = conversion.read_receipt(job)
    if receipt is None:
        return False
    if job.skip_damaged or not any(one.damaged for one in receipt.inputs):
        return True
    shutil.rmtree(job.folder)
    return False


def _complete(source: Source, jobs: Sequence[Job]) -> Manifest:
    """Give the parts of all jobs their names, and write the manifest."""
    receipts = [conversion.read_receipt(job) for job in jobs]
    manifest, moves = _number(source, jobs, [one for one in receipts if one is not None])
    if not manifest.documents:
        raise ConfigError(
            f"{source.folder}: its inputs hold no document ({manifest.empty:,} empty, "
            f"{manifest.damaged:,} damaged); check --text-column {source.column}"
        )
    write_json(source.work / _MOVES, moves)
    for here, there in moves.items():
        os.replace(source.folder / here, source.folder / there)
    durable.sync_folder(source.folder)
    prepared.write_manifest(source.folder, manifest)
    shutil.rmtree(source.work)
    return manifest


def _number(
    source: Source, jobs: Sequence[Job], receipts: Sequence[Receipt]
) -> tuple[Manifest, dict[str, str]]:
    """The manifest, and from where to where each file goes, relative to the folder."""
    files: list[Part] = []
    indices: list[IndexRecord] = []
    moves: dict[str, str] = {}
    for job, receipt in zip(jobs, receipts, strict=True):
        names = {}
        for part in receipt.parts:
            names[part.name] = shards.part_name(len(files))
            files.append(replace(part, name=names[part.name]))
        for index in receipt.indices:
            part_of = next(name for name in names if index.name.startswith(name))
            names[index.name] = names[part_of] + index.name.removeprefix(part_of)
            indices.append(replace(index, name=names[index.name]))
        place = job.folder.relative_to(source.folder)
        moves |= {str(place / old): new for old, new in names.items()}
    inputs = tuple(one for receipt in receipts for one in receipt.inputs)
    manifest = Manifest(
        source=source.name,
        layout=source.layout,
        input_column=source.column,
        files=tuple(files),
        indices=tuple(indices),
        inputs=inputs,
    )
    return manifest, moves


def _undo_moves(source: Source) -> None:
    """Take back the names that an attempt gave which was killed before it wrote the manifest.

    Raises:
        ConfigError: The list of them leads out of the folder: no attempt wrote it.
    """
    path = source.work / _MOVES
    if not path.is_file():
        return
    moves = json.loads(path.read_bytes())
    inside = source.folder.resolve()
    for name in (*moves, *moves.values()):
        if not (inside / name).resolve().is_relative_to(inside):
            raise ConfigError(f"{path} names {name}, which is outside of {source.folder}")
    for here, there in moves.items():
        if (source.folder / there).is_file():
            os.replace(source.folder / there, source.folder / here)
    durable.sync_folder(source.folder)
    path.unlink()
