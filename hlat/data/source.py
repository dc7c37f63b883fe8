"""A source's documents in the order that training reads them, apart from those that it never reads.

The held-out split follows from the source's name and content alone and the order of each epoch from
the seed too, both computed: no index file, no state, and no way for a held-out document to enter
training.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from hlat.config.data import Data
from hlat.config.errors import ConfigError
from hlat.data import text_column
from hlat.data.corpus import Corpus
from hlat.data.data_file import DataFile
from hlat.data.files import find_files
from hlat.data.permutation import Permutation

ROWS_AHEAD = 64
"""Most rows that are worked out at once."""
ROWS_WORTH_IT = 8
"""Fewer than these take longer together than one by one."""


class Source:
    """One source, split into held-out documents and shuffled training documents."""

    def __init__(self, name: str, corpus: Corpus, num_heldout: int, seed: int) -> None:
        """Split the corpus.

        Args:
            name: The source's name; it keys both shuffles.
            corpus: Its documents; what identifies them keys both shuffles too.
            num_heldout: Documents that training never reads.
            seed: Seed of the training order; the split does not depend on it.

        Raises:
            ConfigError: If too few documents, or only empty ones, are left for training.
        """
        self.name = name
        self.corpus = corpus
        self.num_heldout = num_heldout
        self._seed = seed
        if len(corpus) <= 2 * num_heldout:
            most = (len(corpus) - 1) // 2
            smaller = f"set data.heldout_documents to {most} or less, or " if most > 0 else ""
            raise ConfigError(
                f"data.sources.{name} has {len(corpus)} documents, of which "
                f"data.heldout_documents={num_heldout} are held out; more than twice as many are "
                f"needed: {smaller}give the source more files"
            )
        self._content = str(corpus.fingerprint()["sha256"])
        self._split = Permutation(len(corpus), ("heldout", name, self._content))
        # Streams stand in one epoch, or on either side of its end
        self._order = lru_cache(maxsize=2)(self._make_order)
        self._ahead: dict[tuple[int, int], tuple[int, list[int]]] = {}
        heldout_bytes = sum(len(corpus.document(self._split(i))) for i in range(num_heldout))
        if corpus.num_bytes == heldout_bytes:
            raise ConfigError(
                f"data.sources.{name}: every training document is empty; set data.text_column to "
                "the column that holds the documents"
            )

    @property
    def num_training(self) -> int:
        """Documents of one epoch."""
        return len(self.corpus) - self.num_heldout

    def heldout_texts(self) -> Iterator[str]:
        """The held-out documents, in the same order for every seed."""
        return (self.corpus.text(self._split(i)) for i in range(self.num_heldout))

    def training_row(self, position: int) -> int:
        """Row of the document at a position of the endless training order.

        Every document comes once in each epoch, that is in positions [e*n, (e+1)*n) for n =
        num_training.
        """
        epoch, index = divmod(position, self.num_training)
        return self._split(self.num_heldout + self._order(epoch)(index))

    def _make_order(self, epoch: int) -> Permutation:
        key = ("epoch", self._seed, self.name, self._content, epoch)
        return Permutation(self.num_training, key)

    def training_document(self, position: int, stride: int = 1) -> memoryview:
        """The bytes of the document at a position of the endless training order.

        Args:
            position: The place in the order.
            stride: How far on the next wanted position of the same reader probably is. To permute
                many positions at once costs a tenth of one at a time.

        Raises:
            ConfigError: If its file is gone, or is another one than was opened.
        """
        lane = stride, position % stride
        first, rows = self._ahead.get(lane, (position, []))
        place, rest = divmod(position - first, stride)
        if rest or not 0 <= place < len(rows):
            first, place, rows = position, 0, self._rows_ahead(position, stride)
            self._ahead[lane] = first, rows
        return self.corpus.document(rows[place])

    def _rows_ahead(self, position: int, stride: int) -> list[int]:
        """Rows of the documents at `position` and at its reader's next positions in the epoch."""
        epoch, index = divmod(position, self.num_training)
        end = min(self.num_training, index + stride * ROWS_AHEAD)
        indices = np.arange(index, end, stride)
        if len(indices) < ROWS_WORTH_IT:
            return [self.training_row(position)]
        rows: list[int] = self._split(self.num_heldout + self._order(epoch)(indices)).tolist()
        return rows


def open_sources(data: Data, seed: int) -> dict[str, Source]:
    """Open every source of a config, by name in alphabetical order.

    Args:
        data: The corpus of a run.
        seed: Seed of the training order.

    Raises:
        ConfigError: With the problems of all sources at once.
    """
    sources: dict[str, Source] = {}
    files_of: dict[str, list[DataFile]] = {}
    problems: list[str] = []
    for name in sorted(data.sources):
        key = f"data.sources.{name}"
        try:
            files_of[name] = find_files(f"{key}.paths", data.root, data.sources[name].paths)
            column, column_key = _column(data, name)
            corpus = Corpus(files_of[name], column, column_key)
            sources[name] = Source(name, corpus, data.heldout_documents, seed)
        except ConfigError as error:
            problems.extend(error.problems)
    problems += _shared_files(files_of)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return sources


def _column(data: Data, name: str) -> tuple[str, str]:
    """The column that holds a source's documents, and the config key that says so."""
    own = data.sources[name].text_column
    if own is None:
        return data.text_column, text_column.KEY
    return own, f"data.sources.{name}.text_column"


def _shared_files(files_of: Mapping[str, Sequence[DataFile]]) -> list[str]:
    """Refuse a file of two sources: one would train on what the other holds out."""
    owners: dict[str, str] = {}
    problems = []
    for name, files in files_of.items():
        for file in files:
            owner = owners.setdefault(file.resolved, name)
            if owner != name:
                problems.append(
                    f"data.sources.{name}.paths: {file.location} also belongs to "
                    f"data.sources.{owner}; give each file to one source"
                )
    return problems
