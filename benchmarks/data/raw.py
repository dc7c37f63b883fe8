"""The two encoders alone, on the documents of the corpus: the ceiling of any loader on top of them.

Documents lie in memory as text, 64 go into each call, ids come out as NumPy, one thread works. A
"batch" is the ids of one call. Their order is random, as a loader that shuffles reads them: files
of one project, one after the other, have more words in common.
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

    def encode(self, texts: list[str]) -> NDArray[np.int32]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])


class Fast:
    """`encode_batch` of gigatoken."""

    def __init__(self, path: str) -> None:
        self.tokenizer = gigatoken.Tokenizer(path)

    def encode(self, texts: list[str]) -> NDArray[np.int32]:
        ids = self.tokenizer.encode_batch(texts, parallel=False)
        return np.asarray(ids.layout.content.data).astype(np.int32)


class Raw:
    """The documents over and over."""

    def __init__(self, settings: Settings) -> None:
        self.texts = read_texts(settings.arrow_files)
        random.Random(settings.seed).shuffle(self.texts)
        kind = {"reference": Reference, "fast": Fast}[settings.options["encoder"]]
        self.encoder = kind(str(settings.tokenizer_folder / "tokenizer.json"))
        self.start = 0

    def next(self) -> NDArray[np.int32]:
        texts = self.texts[self.start : self.start + DOCUMENTS]
        self.start += DOCUMENTS
        if self.start >= len(self.texts):
            self.start = 0
        return self.encoder.encode(texts)


def read_texts(files: list[str]) -> list[str]:
    """All documents of a corpus."""
    texts: list[str] = []
    for file in files:
        with pa.memory_map(file) as source:
            texts += pa.ipc.open_stream(source).read_all()["text"].to_pylist()
    return texts


def open_loader(settings: Settings) -> Raw:
    """Read the corpus into memory."""
    if settings.workers:
        raise NotImplementedError("one thread")
    return Raw(settings)
