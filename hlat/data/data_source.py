"""Documents of a source in training order, separate from its held-out documents.

The held-out split is a function of the source's name and content; the order of each epoch also
depends on the seed. Both are computed permutations, so no index file or state can become stale and
training cannot read a held-out document.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.config.data import DataConfig
from hlat.data import text_column
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.permutation import Permutation
from hlat.data.source_files import find_source_files
from hlat.storage.data_file import DataFile

MAX_LOOKAHEAD_ROWS = 256
"""Maximum number of rows permuted at once."""
MIN_VECTORIZED_ROWS = 64
"""Approximate number of rows below which one array call is slower than single calls."""


class DataSource:
    """One source, split into held-out documents and shuffled training documents."""

    def __init__(
        self, name: str, dataset: ArrowDataset, num_heldout_documents: int, seed: int
    ) -> None:
        """Split the documents.

        Args:
            name: The source's name, part of both permutation keys.
            dataset: Its documents; their fingerprint is part of both keys.
            num_heldout_documents: Documents that training never reads.
            seed: Seed of the training order; the split does not depend on it.

        Raises:
            ConfigError: If there are too few training documents, or all of them are empty.
        """
        self.name = name
        self.dataset = dataset
        self.num_heldout_documents = num_heldout_documents
        self._seed = seed
        size = len(dataset)
        if size <= 2 * num_heldout_documents:
            most = (size - 1) // 2
            smaller = f"set data.heldout_documents to {most} or less, or " if most > 0 else ""
            raise ConfigError(
                f"data.sources.{name} has {size} documents, of which "
                f"data.heldout_documents={num_heldout_documents} are held out; more than twice as "
                f"many are needed: {smaller}give the source more files"
            )
        self._content_sha256 = str(dataset.compute_fingerprint()["sha256"])
        self._split_permutation = Permutation(size, ("heldout", name, self._content_sha256))
        # The streams read one epoch, or two around its end
        self._epoch_permutation = lru_cache(maxsize=2)(self._build_epoch_permutation)
        self._lookahead: dict[tuple[int, int], tuple[int, list[int]]] = {}
        heldout_rows = map(self._split_permutation, range(num_heldout_documents))
        heldout_bytes = sum(len(dataset.read_document(row)) for row in heldout_rows)
        if dataset.num_bytes == heldout_bytes:
            raise ConfigError(
                f"data.sources.{name}: every training document is empty; set data.text_column to "
                "the column that holds the documents"
            )

    @property
    def num_training_documents(self) -> int:
        """Documents of one epoch."""
        return len(self.dataset) - self.num_heldout_documents

    def read_heldout_documents(self) -> Iterator[str]:
        """Yield the held-out documents in an order that does not depend on the seed."""
        rows = map(self._split_permutation, range(self.num_heldout_documents))
        return map(self.dataset.read_text, rows)

    def get_training_row(self, position: int) -> int:
        """Return the row of the document at a position of the endless training order.

        Positions [e*n, (e+1)*n) with n = num_training_documents contain every document once.
        """
        epoch, index = divmod(position, self.num_training_documents)
        permuted = self._epoch_permutation(epoch)(index)
        return self._split_permutation(self.num_heldout_documents + permuted)

    def _build_epoch_permutation(self, epoch: int) -> Permutation:
        key = ("epoch", self._seed, self.name, self._content_sha256, epoch)
        return Permutation(self.num_training_documents, key)

    def read_training_document(self, position: int, stride: int = 1) -> memoryview:
        """Return the bytes of the document at a position of the endless training order.

        Args:
            position: Position in the order.
            stride: Expected distance to the reader's next position. Positions are permuted in
                groups of up to `MAX_LOOKAHEAD_ROWS`, which is faster than single positions.

        Raises:
            ConfigError: If its file is missing or has changed.
        """
        lane = stride, position % stride
        first, rows = self._lookahead.get(lane, (position, []))
        index, remainder = divmod(position - first, stride)
        if remainder or not 0 <= index < len(rows):
            index, rows = 0, self._compute_lookahead_rows(position, stride)
            self._lookahead[lane] = position, rows
        return self.dataset.read_document(rows[index])

    def _compute_lookahead_rows(self, position: int, stride: int) -> list[int]:
        """Return the rows at `position` and the reader's next positions in the epoch."""
        epoch, index = divmod(position, self.num_training_documents)
        end = min(self.num_training_documents, index + stride * MAX_LOOKAHEAD_ROWS)
        indices = np.arange(index, end, stride)
        if len(indices) < MIN_VECTORIZED_ROWS:
            return [self.get_training_row(position)]
        permuted = self._epoch_permutation(epoch)(indices)
        rows: list[int] = self._split_permutation(self.num_heldout_documents + permuted).tolist()
        return rows


def open_data_sources(data: DataConfig, seed: int) -> dict[str, DataSource]:
    """Open every source of a config, by name in alphabetical order.

    Raises:
        ConfigError: With the problems of all sources.
    """
    sources: dict[str, DataSource] = {}
    files_by_source: dict[str, list[DataFile]] = {}
    problems: list[str] = []
    for name in sorted(data.sources):
        key = f"data.sources.{name}"
        try:
            files = find_source_files(f"{key}.paths", data.root, data.sources[name].paths)
            files_by_source[name] = files
            column, column_key = data.sources[name].text_column, f"{key}.text_column"
            if column is None:
                column, column_key = data.text_column, text_column.CONFIG_KEY
            dataset = ArrowDataset(files, column, column_key)
            sources[name] = DataSource(name, dataset, data.heldout_documents, seed)
        except ConfigError as error:
            problems.extend(error.problems)
    problems += _find_shared_files(files_by_source)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return sources


def _find_shared_files(files_by_source: Mapping[str, Sequence[DataFile]]) -> list[str]:
    """Return a problem per file of two sources, as one would train on the other's held-out text."""
    owners: dict[str, str] = {}
    problems = []
    for name, files in files_by_source.items():
        for file in files:
            owner = owners.setdefault(file.resolved_location, name)
            if owner != name:
                problems.append(
                    f"data.sources.{name}.paths: {file.location} also belongs to "
                    f"data.sources.{owner}; give each file to one source"
                )
    return problems
