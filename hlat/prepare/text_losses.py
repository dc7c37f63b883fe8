"""Text that a preparation does not contain: records, limits, and lines for the screen.

Skipped files and lost text are grouped by their reason, since thousands of files may have a few
reasons.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hlat.config.config_errors import ConfigError
from hlat.config.untrusted_files import format_value
from hlat.prepare.document_reader import DamagedDocument
from hlat.prepare.file_formats import get_suffix
from hlat.prepare.input_files import SkippedFile
from hlat.storage.progress_bar import format_bytes

DEFAULT_MAX_LOST = 0.01
"""Default of `max_lost=`: fraction of the bytes of text that a preparation may lose."""
_SHOWN_FILES = 3
"""Files per reason on the screen; the manifest and report list all of them."""
_SHOWN_SUFFIXES = 6


@dataclass(frozen=True)
class TextLoss:
    """Text of a file that was lost for one reason."""

    path: str
    category: str
    """Reason, without the details of a document."""
    first: str
    """Location and details of the first damage."""
    documents: int
    """Lost documents; a damaged part of a file counts as one if their number is unknown."""
    bytes: int
    """Bytes of text; of a part that cannot be decompressed, bytes of the file."""
    is_whole_file: bool = False
    """True if no document of the file could be read."""


@dataclass(frozen=True)
class SkippedRecord:
    """Number of matching files that are no inputs for one reason, with one suffix."""

    reason: str
    suffix: str
    files: int
    bytes: int


class FileLosses:
    """Losses of one file, by reason."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._losses: dict[str, TextLoss] = {}

    def add(self, damage: DamagedDocument) -> None:
        """Add a document that cannot be read."""
        first = f"{damage.location}{damage.reason.removeprefix(damage.category)}"
        loss = self._losses.get(damage.category, TextLoss(self._path, damage.category, first, 0, 0))
        documents = loss.documents + damage.num_documents
        total = loss.bytes + damage.num_bytes
        self._losses[damage.category] = replace(loss, documents=documents, bytes=total)

    def finish(self, num_read: int) -> list[TextLoss]:
        """Return the losses of the file, of which `num_read` documents could be read."""
        return [replace(loss, is_whole_file=not num_read) for loss in self._losses.values()]


def validate_losses(
    label: str,
    losses: Sequence[TextLoss],
    num_bytes_read: int,
    max_lost: float | None = None,
    remedy: str = "max_lost={}",
) -> None:
    """Raise ConfigError if more text is lost than allowed.

    Args:
        label: Beginning of the message.
        losses: All losses.
        num_bytes_read: Bytes of text that could be read.
        max_lost: Largest fraction of the text; None: `DEFAULT_MAX_LOST`, and no whole file.
        remedy: Setting that accepts the loss, with braces for the fraction.
    """
    fraction = _compute_lost_fraction(losses, num_bytes_read)
    limit = DEFAULT_MAX_LOST if max_lost is None else max_lost
    num_whole = len({loss.path for loss in losses if loss.is_whole_file})
    problems = []
    if fraction > limit:
        problems.append(f"{fraction:.2%} of the text is lost, and {100 * limit:g}% is accepted")
    if num_whole and max_lost is None:
        problems.append(f"{_format_count(num_whole, 'file')} without a readable document")
    if problems:
        accepted = max(math.ceil(fraction * 100) / 100, limit)
        raise ConfigError(
            f"{label}: {'; '.join(problems)}; repair or remove the files, or accept the loss "
            f"with {remedy.format(f'{accepted:g}')}",
            *format_losses(losses, num_bytes_read),
        )


def format_losses(
    losses: Sequence[TextLoss], num_bytes_read: int, max_files: int = _SHOWN_FILES
) -> Iterator[str]:
    """Yield lines with the losses by reason, the largest first, and `max_files` files of each."""
    if not losses:
        return
    fraction = _compute_lost_fraction(losses, num_bytes_read)
    yield f"lost: {fraction:.2%} of the text, {_format_size(losses)}"
    groups: dict[str, list[TextLoss]] = {}
    for loss in losses:
        groups.setdefault(loss.category, []).append(loss)
    for category, group in sorted(groups.items(), key=lambda item: -_sum_bytes(item[1])):
        yield f"  {_format_size(group)}: {category}"
        for loss in sorted(group, key=lambda loss: -loss.bytes)[:max_files]:
            yield f"    {loss.path}"
            yield f"      {loss.first}"
        if len(group) > max_files:
            yield f"    and {len(group) - max_files:,} more files"


def group_skipped(files: Iterable[SkippedFile]) -> list[SkippedRecord]:
    """Return records of files by reason and suffix, the most frequent first."""
    totals: dict[tuple[str, str], list[int]] = {}
    for file in files:
        counts = totals.setdefault((file.reason, get_suffix(file.path)), [0, 0])
        counts[0] += 1
        counts[1] += file.num_bytes
    records = [SkippedRecord(*key, *counts) for key, counts in totals.items()]
    return sorted(records, key=lambda one: (-one.files, one.reason, one.suffix))


def format_skipped(records: Sequence[SkippedRecord], num_read: int) -> Iterator[str]:
    """Yield lines with the number of skipped files by reason and suffix."""
    if not records:
        return
    num_files = sum(one.files for one in records)
    size = format_bytes(sum(one.bytes for one in records))
    yield f"skipped: {num_files:,} of {num_files + num_read:,} files, {size}"
    for reason in dict.fromkeys(one.reason for one in records):
        group = [one for one in records if one.reason == reason]
        counts = [f"{one.files:,} {format_value(one.suffix)}" for one in group[:_SHOWN_SUFFIXES]]
        if len(group) > _SHOWN_SUFFIXES:
            counts.append(f"{sum(one.files for one in group[_SHOWN_SUFFIXES:]):,} others")
        yield f"  {reason}: {format_bytes(sum(one.bytes for one in group))} ({', '.join(counts)})"


def format_encodings(encodings: Mapping[str, int]) -> Iterator[str]:
    """Yield a line with the documents that were converted to UTF-8, if there are any."""
    if encodings:
        counts = ", ".join(f"{count:,} from {name}" for name, count in sorted(encodings.items()))
        yield f"documents converted to UTF-8: {counts}"


def _compute_lost_fraction(losses: Sequence[TextLoss], num_bytes_read: int) -> float:
    num_lost = _sum_bytes(losses)
    return num_lost / max(1, num_lost + num_bytes_read)


def _sum_bytes(losses: Sequence[TextLoss]) -> int:
    return sum(loss.bytes for loss in losses)


def _format_size(losses: Sequence[TextLoss]) -> str:
    num_files = len({loss.path for loss in losses})
    num_documents = sum(loss.documents for loss in losses)
    counts = _format_count(num_documents, "document"), _format_count(num_files, "file")
    return f"{format_bytes(_sum_bytes(losses))} in {' of '.join(counts)}"


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
