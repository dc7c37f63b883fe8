"""Sample of the documents of files, to train a tokenizer on."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing

from hlat.prepare.conversion_job import estimate_text_bytes
from hlat.prepare.document_reader import DamagedDocument, parse_documents
from hlat.prepare.input_files import InputReader
from hlat.prepare.text_losses import FileLosses, TextLoss
from hlat.storage.data_file import DataFile
from hlat.storage.progress_bar import ProgressBar

_MAX_MEASURED_DOCUMENTS = 256


class TextSample:
    """Documents of files, sampled to about `max_bytes` bytes by a hash of their text."""

    def __init__(self, files: Sequence[DataFile], column: str, max_bytes: int) -> None:
        self.measured: list[str] = []
        """Some of the sampled documents."""
        self.lost: list[TextLoss] = []
        """Text that could not be read."""
        self.num_bytes_read = 0
        self._files, self._column = files, column
        num_bytes = sum(map(estimate_text_bytes, files))
        self._threshold = min(1.0, max_bytes / max(1, num_bytes)) * 2**64

    def __iter__(self) -> Iterator[str]:
        """Yield the sampled documents; omit empty and damaged ones."""
        num_bytes = sum(file.num_bytes for file in self._files)
        with closing(ProgressBar("reading", num_bytes)) as progress:
            for file in self._files:
                with InputReader(file.location, progress.add) as reader:
                    yield from self._sample_file(reader, file.location)

    def _sample_file(self, reader: InputReader, path: str) -> Iterator[str]:
        losses, num_read = FileLosses(path), 0
        for document in parse_documents(reader, path, self._column):
            if isinstance(document, DamagedDocument):
                losses.add(document)
            elif document:
                num_read += 1
                self.num_bytes_read += len(document)
                digest = hashlib.blake2b(document, digest_size=8).digest()
                if int.from_bytes(digest, "little") < self._threshold:
                    yield self._decode(document)
        self.lost += losses.finish(num_read)

    def _decode(self, document: bytes) -> str:
        text = str(document, "utf-8")
        if len(self.measured) < _MAX_MEASURED_DOCUMENTS:
            self.measured.append(text)
        return text
