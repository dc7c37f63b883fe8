"""Records of slices and of the files that contain them.

Ranks along a mesh axis usually save slices of equal size at a constant distance, in files with
consecutive numbers. One record with a `RepeatedAxis` describes all of them, so the manifest of
thousands of ranks has few records for each tensor.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.distributed.tensor_slice import TensorSlice

_RANK_FILE = re.compile(r"rank_(\d{5}|[1-9]\d{5,11})\.safetensors")


@dataclass(frozen=True, order=True)
class RepeatedAxis:
    """Number of slices along an axis, and the distance of their offsets and of their files."""

    count: int
    offset_step: tuple[int, ...]
    file_step: int


@dataclass(frozen=True)
class SliceRecord:
    """Slice of a tensor and the name of the file that contains it.

    With `axes`, the record also describes the slices at all multiples of the steps of each axis.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    axes: tuple[RepeatedAxis, ...] = ()

    @property
    def tensor_slice(self) -> TensorSlice:
        """Smallest slice that contains all slices of the record."""
        size = self.size
        for axis in self.axes:
            steps = zip(size, axis.offset_step, strict=True)
            size = tuple(extent + (axis.count - 1) * step for extent, step in steps)
        return TensorSlice(self.offset, size)

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return prod(axis.count for axis in self.axes)

    @property
    def numel(self) -> int:
        """Number of elements of all slices."""
        return prod(self.size) * self.num_slices

    def find_overlaps(self, tensor_slice: TensorSlice) -> Iterator["SliceRecord"]:
        """Yield the single slices that overlap `tensor_slice`."""
        if tensor_slice.intersect(self.tensor_slice) is None:
            return
        if not self.axes:
            yield self
            return
        axis, *rest = self.axes
        number = parse_rank_file(self.file)
        assert number is not None
        for i in range(axis.count):
            offset = tuple(
                start + i * step for start, step in zip(self.offset, axis.offset_step, strict=True)
            )
            file = format_rank_file(number + i * axis.file_step)
            yield from SliceRecord(offset, self.size, file, tuple(rest)).find_overlaps(tensor_slice)

    def list_offsets(self) -> NDArray[np.int64]:
        """Return the offsets of the single slices, [num_slices, number of dimensions]."""
        offsets = np.array([self.offset], np.int64).reshape(1, len(self.offset))
        for axis in self.axes:
            steps = np.arange(axis.count)[:, None] * np.array(axis.offset_step, np.int64)
            offsets = (offsets[:, None] + steps).reshape(-1, len(self.offset))
        return offsets

    def list_files(self) -> list[str]:
        """Return the file of each single slice."""
        if not self.axes:
            return [self.file]
        number = parse_rank_file(self.file)
        assert number is not None
        numbers = [number]
        for axis in self.axes:
            numbers = [n + i * axis.file_step for n in numbers for i in range(axis.count)]
        return [*map(format_rank_file, numbers)]

    def find_in_file(self, file: str) -> Iterator["SliceRecord"]:
        """Yield the single slices that a file contains."""
        first, number = parse_rank_file(self.file), parse_rank_file(file)
        if not self.axes or first is None or number is None:
            if self.file == file:
                yield self
            return
        numbers = np.array([first])
        for axis in self.axes:
            numbers = (numbers[:, None] + np.arange(axis.count) * axis.file_step).reshape(-1)
        for offset in self.list_offsets()[numbers == number].tolist():
            yield SliceRecord(tuple(offset), self.size, file)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON representation."""
        axes = [[axis.count, axis.offset_step, axis.file_step] for axis in self.axes]
        record = {"offset": self.offset, "size": self.size, "file": self.file}
        return record | {"axes": axes} if axes else record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "SliceRecord":
        """Return the record for its JSON representation."""
        axes = tuple(
            RepeatedAxis(count, tuple(offset_step), file_step)
            for count, offset_step, file_step in record.get("axes", ())
        )
        return cls(tuple(record["offset"]), tuple(record["size"]), record["file"], axes)


def format_rank_file(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank_{rank:05d}.safetensors"


def parse_rank_file(name: str) -> int | None:
    """Return the rank of a file name; None for other names."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) if match else None


def merge_slice_records(records: Iterable[SliceRecord]) -> tuple[SliceRecord, ...]:
    """Describe the same slices with fewer records, sorted by size and offset.

    Records of equal size with a constant distance become one record with one more axis.
    """
    merged: list[SliceRecord] = []
    in_order = sorted(records, key=lambda one: (one.size, one.axes, one.offset, one.file))
    for _, similar in groupby(in_order, key=lambda one: (one.size, one.axes)):
        progressions: list[list[SliceRecord]] = []
        for record in similar:
            if progressions and _continues(progressions[-1], record):
                progressions[-1].append(record)
            else:
                progressions.append([record])
        merged += map(_merge_progression, progressions)
    return tuple(merged)


def _continues(progression: list[SliceRecord], record: SliceRecord) -> bool:
    """Return True if a record has the distance of the records before it."""
    distance = _compute_distance(progression[-1], record)
    if distance is None or len(progression) == 1:
        return distance is not None
    return distance == _compute_distance(*progression[:2])


def _compute_distance(
    first: SliceRecord, second: SliceRecord
) -> tuple[tuple[int, ...], int] | None:
    """Return the distances of offsets and files; None if no axis can have them."""
    numbers = parse_rank_file(first.file), parse_rank_file(second.file)
    if numbers[0] is None or numbers[1] is None or numbers[1] <= numbers[0]:
        return None
    steps = tuple(b - a for a, b in zip(first.offset, second.offset, strict=True))
    return None if any(step < 0 for step in steps) else (steps, numbers[1] - numbers[0])


def _merge_progression(progression: list[SliceRecord]) -> SliceRecord:
    first = progression[0]
    if len(progression) == 1:
        return first
    distance = _compute_distance(*progression[:2])
    assert distance is not None
    return replace(first, axes=(RepeatedAxis(len(progression), *distance), *first.axes))
