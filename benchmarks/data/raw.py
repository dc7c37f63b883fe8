"""The two encoders without a loader, on the documents of the corpus: the upper limit of loaders.

Documents are in memory as text. Each call encodes 64 of them in one thread and returns NumPy ids, a
"batch". Their order is random, as in a loader that shuffles, because consecutive files of one
project have more words in common.
"""

import random

import gigatoken
import numpy as np
import pyarrow as pa
import tokenizers
from contestants import Settings
from numpy.typing import NDArray

DOCUMENTS = 64


class Reference:
    """`encode_batch_fast` of the tokenizers library."""

    def __init__(self, path: str) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.tokenizer.encode_special_tokens = True

    def encode(self, documents: list[str]) -> NDArray[np.int32]:
        encodings = self.tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])


class Fast:
    """`encode_batch` of gigatoken."""

    def __init__(self, path: str) -> None:
        self.tokenizer = gigatoken.Tokenizer(path)

    def encode(self, documents: list[str]) -> NDArray[np.int32]:
        ids = self.tokenizer.encode_batch(documents, parallel=False)
        return np.asarray(ids.layout.content.data).astype(np.int32)


class Raw:
    """Contestant that encodes the documents repeatedly."""

    def __init__(self, settings: Settings) -> None:
        self.documents = read_documents(settings.arrow_files)
        random.Random(settings.seed).shuffle(self.documents)
        kind = Fast if settings.options["encoder"] == "fast" else Reference
        self.encoder: Fast | Reference = kind(str(settings.tokenizer_folder / "tokenizer.json"))
        self.start = 0

    def next(self) -> NDArray[np.int32]:
        documents = self.documents[self.start : self.start + DOCUMENTS]
        self.start += DOCUMENTS
        if self.start >= len(self.documents):
            self.start = 0
        return self.encoder.encode(documents)


def read_documents(files: list[str]) -> list[str]:
    """Return all documents of a corpus."""
    documents: list[str] = []
    for file in files:
        with pa.memory_map(file) as source:
            documents += pa.ipc.open_stream(source).read_all()["text"].to_pylist()
    return documents


def open_loader(settings: Settings) -> Raw:
    """Read the corpus into memory."""
    if settings.workers:
        raise NotImplementedError("one thread")
    return Raw(settings)
