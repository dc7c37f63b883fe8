"""Documents of a source in training order, separate from its held-out documents.

The held-out documents are those of separate files, or a function of the source's name and content.
The order of each epoch also depends on the seed. Both are computed permutations, so no index file
or state can become stale and training cannot read a held-out document.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.data import DataConfig
from hlat.data import text_column
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.permutation import Permutation
from hlat.data.source_files import find_source_files
from hlat.storage.data_file import DataFile

MIN_LOOKAHEAD_ROWS = 256
MAX_LOOKAHEAD_ROWS = 2048
"""Minimum and maximum number of rows permuted at once. The number doubles while a reader continues,
because a large one delays the first batch and a small one costs more per row."""
MIN_VECTORIZED_ROWS = 64
"""Approximate number of rows below which one array call is slower than single calls."""
_NO_ROWS: tuple[int, Sequence[int]] = (0, ())


class DataSource:
    """One source, split into held-out documents and shuffled training documents."""

    def __init__(
        self,
        name: str,
        dataset: ArrowDataset,
        num_heldout_documents: int,
        seed: int,
        heldout: ArrowDataset | None = None,
    ) -> None:
        """Split the documents.

        Args:
            name: The source's name, part of the permutation keys.
            dataset: Its documents; their fingerprint is part of the keys.
            num_heldout_documents: Documents of `dataset` that training never reads.
            seed: Seed of the training order; the split does not depend on it.
            heldout: All held-out documents; then none of `dataset` are held out.

        Raises:
            ConfigError: If there are too few training documents, or all of them are empty.
        """
        self.name = name
        self.dataset = dataset
        self.heldout_dataset = heldout
        self._num_reserved = num_heldout_documents if heldout is None else 0
        self._seed = seed
        size = len(dataset)
        _validate_size(name, size, self._num_reserved)
        self._content_sha256 = str(dataset.compute_fingerprint()["sha256"])
        self._split_permutation = Permutation(size, ("heldout", name, self._content_sha256))
        # The streams read one epoch, or two around its end
        self._epoch_permutation = lru_cache(maxsize=2)(self._build_epoch_permutation)
        self._lookahead: dict[tuple[int, int], tuple[int, Sequence[int]]] = {}
        reserved_rows = map(self._split_permutation, range(self._num_reserved))
        reserved_bytes = sum(len(dataset.read_document(row)) for row in reserved_rows)
        if dataset.num_bytes == reserved_bytes:
            raise ConfigError(
                f"data.sources.{name}: every training document is empty; set data.text_column to "
                "the column that holds the documents"
            )

    @property
    def num_training_documents(self) -> int:
        """Documents of one epoch."""
        return len(self.dataset) - self._num_reserved

    @property
    def num_heldout_documents(self) -> int:
        """Documents that training never reads."""
        heldout = self.heldout_dataset
        return self._num_reserved if heldout is None else len(heldout)

    def read_heldout_documents(self) -> Iterator[str]:
        """Yield the held-out documents in an order that does not depend on the seed."""
        dataset, permutation = self.dataset, self._split_permutation
        if self.heldout_dataset is not None:
            dataset = self.heldout_dataset
            key = "heldout", self.name, str(dataset.compute_fingerprint()["sha256"])
            permutation = Permutation(len(dataset), key)
        return map(dataset.read_text, map(permutation, range(self.num_heldout_documents)))

    def compute_fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the documents, and of separate held-out documents."""
        fingerprint = self.dataset.compute_fingerprint()
        if self.heldout_dataset is not None:
            fingerprint["heldout"] = self.heldout_dataset.compute_fingerprint()
        return fingerprint

    def get_training_row(self, position: int) -> int:
        """Return the row of the document at a position of the endless training order.

        Positions [e*n, (e+1)*n) with n = num_training_documents contain every document once.
        """
        epoch, index = divmod(position, self.num_training_documents)
        permuted = self._epoch_permutation(epoch)(index)
        return self._split_permutation(self._num_reserved + permuted)

    def _build_epoch_permutation(self, epoch: int) -> Permutation:
        key = ("epoch", self._seed, self.name, self._content_sha256, epoch)
        return Permutation(self.num_training_documents, key)

    def read_training_document(self, position: int, stride: int = 1) -> memoryview:
        """Return the first document of `iter_training_documents`."""
        return next(self.iter_training_documents(position, stride))

    def iter_training_documents(self, position: int, stride: int) -> Iterator[memoryview]:
        """Yield the bytes of the documents at positions of the endless training order.

        Args:
            position: First position in the order.
            stride: Distance between the positions. They are permuted in groups of up to
                `MAX_LOOKAHEAD_ROWS`, which is faster than single positions.

        Raises:
            ConfigError: If a file is missing or has changed.
        """
        read_document = self.dataset.read_document
        while True:
            rows = self._find_lookahead_rows(position, stride)
            for row in rows:
                yield read_document(row)
            position += stride * len(rows)

    def _find_lookahead_rows(self, position: int, stride: int) -> Sequence[int]:
        """Return the rows at `position` and some of the next positions, at least one."""
        lane = stride, position % stride
        first, rows = self._lookahead.get(lane, _NO_ROWS)
        index = (position - first) // stride
        if not 0 <= index < len(rows):
            count = min(MAX_LOOKAHEAD_ROWS, max(MIN_LOOKAHEAD_ROWS, 2 * len(rows)))
            index, rows = 0, self._compute_lookahead_rows(position, stride, count)
            self._lookahead[lane] = position, rows
        return rows[index:]

    def _compute_lookahead_rows(self, position: int, stride: int, count: int) -> Sequence[int]:
        """Return the rows at `position` and at up to `count` positions in the epoch."""
        epoch, index = divmod(position, self.num_training_documents)
        end = min(self.num_training_documents, index + stride * count)
        indices = np.arange(index, end, stride)
        if len(indices) < MIN_VECTORIZED_ROWS:
            return [self.get_training_row(position)]
        permuted = self._epoch_permutation(epoch)(indices)
        # A memoryview, because access to one NumPy element is slower and a list is larger
        return self._split_permutation(self._num_reserved + permuted).data


def _validate_size(name: str, size: int, num_heldout_documents: int) -> None:
    """Raise ConfigError if half of the documents or more are held out, or there are none."""
    if size > 2 * num_heldout_documents:
        return
    most = (size - 1) // 2
    smaller = f"set data.heldout_documents to {most} or less, or " if most > 0 else ""
    raise ConfigError(
        f"data.sources.{name} has {size} documents, of which "
        f"data.heldout_documents={num_heldout_documents} are held out; more than twice as "
        f"many are needed: {smaller}give the source more files"
    )


def open_data_sources(data: DataConfig, seed: int) -> dict[str, DataSource]:
    """Open every source of a config, by name in alphabetical order.

    Raises:
        ConfigError: With the problems of all sources.
    """
    sources: dict[str, DataSource] = {}
    files_by_key: dict[str, list[DataFile]] = {}
    problems: list[str] = []
    for name in sorted(data.sources):
        try:
            sources[name] = _open_data_source(data, name, seed, files_by_key)
        except ConfigError as error:
            problems.extend(error.problems)
    problems += _find_shared_files(files_by_key)
    raise_config_errors(dict.fromkeys(problems))
    return sources


def _open_data_source(
    data: DataConfig, name: str, seed: int, files_by_key: dict[str, list[DataFile]]
) -> DataSource:
    """Open one source, and add its files to `files_by_key` by config key."""
    key, source = f"data.sources.{name}", data.sources[name]
    column, column_key = source.text_column, f"{key}.text_column"
    if column is None:
        column, column_key = data.text_column, text_column.CONFIG_KEY

    def open_files(paths_key: str, paths: Sequence[str]) -> ArrowDataset:
        files = files_by_key[paths_key] = find_source_files(paths_key, data.root, paths)
        return ArrowDataset(files, column, column_key)

    dataset, heldout = open_files(f"{key}.paths", source.paths), None
    if source.heldout_paths:
        heldout = open_files(f"{key}.heldout_paths", source.heldout_paths)
    return DataSource(name, dataset, data.heldout_documents, seed, heldout)


def _find_shared_files(files_by_key: Mapping[str, Sequence[DataFile]]) -> list[str]:
    """Return a problem per file of two keys, as a run would train on held-out text."""
    owners: dict[str, str] = {}
    problems = []
    for key, files in files_by_key.items():
        for file in files:
            owner = owners.setdefault(file.resolved_location, key)
            if owner != key:
                problems.append(
                    f"{key}: {file.location} also belongs to {owner}; give each file to one of them"
                )
    return problems
