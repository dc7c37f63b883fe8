"""One job of a preparation: some inputs become the parts of one folder, or nothing.

Work that is killed must leave nothing that is trusted, and work that is done must be found again.
So a job's parts appear whole, by one rename, in a folder named after all that they are made from:
a changed input is another job.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hlat.checkpoint import durable
from hlat.config.errors import ConfigError
from hlat.data.preparation import documents, shards
from hlat.data.preparation.documents import Damage
from hlat.data.preparation.inputs import Input, OpenInput, kind
from hlat.data.preparation.prepared import IndexRecord, InputRecord, write_json
from hlat.data.preparation.shards import Part

FORMAT = 1
"""Part of a job's name; raised when the same inputs give other parts."""
JOB_BYTES = 256 << 20
"""Text, as far as sizes tell, after which a job takes no further input: neither a part for each of
a thousand small files, nor all of them in the hands of one worker."""
EXPANSION = 4
"""About how many bytes of text a byte of a compressed file gives."""
TEMPORARY = "unfinished-"
"""Begins the names of what a job has not finished."""
RECEIPT = "receipt.json"


@dataclass(frozen=True)
class Job:
    """Inputs that are converted together."""

    work: Path
    """Folder that the job's own folder appears in."""
    inputs: tuple[Input, ...]
    column: str
    skip_damaged: bool

    @property
    def folder(self) -> Path:
        """Where its parts are once it is done."""
        made_from = [FORMAT, self.column, [asdict(one) for one in self.inputs]]
        return self.work / hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:24]

    @property
    def num_bytes(self) -> int:
        """Bytes of its inputs."""
        return sum(one.bytes for one in self.inputs)


@dataclass(frozen=True)
class Receipt:
    """What a job has made."""

    inputs: tuple[InputRecord, ...]
    parts: tuple[Part, ...]
    indices: tuple[IndexRecord, ...]
    """Row indices of the parts, in their order."""


def cut(work: Path, inputs: Iterable[Input], column: str, skip_damaged: bool) -> Iterator[Job]:
    """Divide inputs into jobs, by their sizes alone, so that every attempt divides them alike."""
    batch: list[Input] = []
    size = 0
    for one in inputs:
        batch.append(one)
        size += one.bytes * (1 if kind(one.path) == ("lines", None) else EXPANSION)
        if size >= JOB_BYTES:
            yield Job(work, tuple(batch), column, skip_damaged)
            batch, size = [], 0
    if batch:
        yield Job(work, tuple(batch), column, skip_damaged)


def read_receipt(job: Job) -> Receipt | None:
    """What a job has made, if it is done."""
    try:
        content = json.loads((job.folder / RECEIPT).read_bytes())
    except FileNotFoundError:
        return None
    return Receipt(
        tuple(InputRecord(**one) for one in content["inputs"]),
        tuple(Part(**one) for one in content["parts"]),
        tuple(IndexRecord(**one) for one in content["indices"]),
    )


def convert(job: Job, tick: Callable[[int], None]) -> None:
    """Do a job.

    Args:
        job: What to convert; its folder is not there.
        tick: Told how many further bytes of input are done; may raise to stop the job.

    Raises:
        ConfigError: If an input cannot be read, or is damaged and that is not allowed.
        OSError: If the parts cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=job.work) as temporary:
        folder = Path(temporary) / job.folder.name
        folder.mkdir()
        writer = shards.Writer(folder)
        try:
            records = [_convert_input(job, one, writer, tick) for one in job.inputs]
            parts = writer.finish()
        finally:
            writer.abandon()
        receipt = Receipt(tuple(records), tuple(parts), tuple(_index(folder, parts)))
        write_json(folder / RECEIPT, asdict(receipt))
        durable.rename(folder, job.folder)


def _convert_input(
    job: Job, one: Input, writer: shards.Writer, tick: Callable[[int], None]
) -> InputRecord:
    counts = {"documents": 0, "text_bytes": 0, "empty": 0, "damaged": 0}
    with OpenInput(one.path, tick) as file:
        for document in documents.read_open(file, one.path, job.column):
            if isinstance(document, Damage):
                if not job.skip_damaged:
                    raise _damaged(one, document)
                counts["damaged"] += 1
            elif document:
                writer.add(document)
                counts["documents"] += 1
                counts["text_bytes"] += len(document)
            else:
                counts["empty"] += 1
        tick(one.bytes - file.num_read)
    return InputRecord(one.path, one.bytes, one.version, **counts)


def _damaged(one: Input, damage: Damage) -> ConfigError:
    return ConfigError(
        f"{one.path}, {damage.place}: {damage.reason}; mend the file and start the same command "
        "again, or leave such documents out, counted, with --skip-damaged"
    )


def _index(folder: Path, parts: Iterable[Part]) -> Iterator[IndexRecord]:
    """Write the row index of each part and flush it to the disk."""
    for part in parts:
        path = shards.write_row_index(folder / part.name)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found = durable.measure(path)
        yield IndexRecord(path.name, found.size, found.sha256)
