"""mosaicml-streaming with tokenization in `__getitem__`.

StreamingDataset and StreamingDataLoader are used as in the guide, with the default shuffle;
`__getitem__` is where the guide transforms samples. The library cannot pack text that is tokenized
online, so this module concatenates documents and adds the remaining tokens to the library's state.
The loader returns 64 documents at a time.
"""

import pickle
from typing import Any

import no_torchvision  # noqa: F401  (before streaming)
import numpy as np
from contestants import EOS, LENGTH, ROWS, Settings
from numpy.typing import NDArray
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from transformers import PreTrainedTokenizerFast

DOCUMENTS = 64


class Documents(StreamingDataset):
    """Dataset of the token ids of documents, each with its EOS."""

    def __init__(self, settings: Settings) -> None:
        folder = settings.scratch / "mds" / settings.corpus
        super().__init__(
            local=str(folder), shuffle=True, shuffle_seed=settings.seed, batch_size=DOCUMENTS
        )
        path = str(settings.tokenizer_folder / "tokenizer.json")
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
        self.eos = self.tokenizer.convert_tokens_to_ids(EOS[settings.tokenizer])

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        text = super().__getitem__(index)["text"]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, self.eos], np.int32)


def collate(documents: list[NDArray[np.int32]]) -> dict[str, list[Any]]:
    """Return a dict, because the loader counts samples by the length of its first value."""
    return {"documents": documents}


class Mosaic:
    """Contestant that returns batches of concatenated documents."""

    def __init__(self, settings: Settings) -> None:
        self.repeat = settings.repeat
        self.loader = StreamingDataLoader(
            Documents(settings),
            batch_size=DOCUMENTS,
            num_workers=settings.workers,
            collate_fn=collate,
        )
        self.batches: Any = None
        self.rest = np.empty(0, np.int32)

    def next(self) -> NDArray[np.int32]:
        parts = [self.rest]
        size = len(self.rest)
        while size < ROWS * LENGTH:
            documents = self._next_documents()
            parts += documents
            size += sum(map(len, documents))
        tokens = np.concatenate(parts)
        self.rest = tokens[ROWS * LENGTH :]
        return tokens[: ROWS * LENGTH].reshape(ROWS, LENGTH)

    def _next_documents(self) -> list[NDArray[np.int32]]:
        if self.batches is None:
            self.batches = iter(self.loader)
        batch = next(self.batches, None)
        if batch is None:
            if not self.repeat:
                raise StopIteration
            self.batches = None
            return self._next_documents()
        return batch["documents"]

    def state(self) -> bytes:
        return pickle.dumps((self.loader.state_dict(), self.rest))

    def restore(self, state: bytes) -> None:
        loader, self.rest = pickle.loads(state)
        self.loader.load_state_dict(loader)

    def close(self) -> None:
        self.batches = None


def open_loader(settings: Settings) -> Mosaic:
    """Remove shared memory of earlier processes and open the shards."""
    clean_stale_shared_memory()
    return Mosaic(settings)
