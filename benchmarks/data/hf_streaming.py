"""Hugging Face `datasets`, streaming: shuffle, tokenize and group as in its documentation.

`shuffle(buffer_size=1000)` and `map(batched=True)` follow the guide on streaming. Grouping into
blocks follows the language modeling example of transformers: an incomplete block at the end of
1,000 documents is dropped. StatefulDataLoader is the guide's recommendation for resuming. Two
choices favor this contestant: the collator of transformers converts lists to tensors, because
`with_format("torch")` converts token by token, and workers save their state every 500 batches
instead of every batch. `datasets` updates its state for each document; with `stateful=False`, an
ordinary DataLoader reads the same batches without this cost and cannot resume.
"""

import pickle
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from contestants import EOS, LENGTH, ROWS, Settings
from datasets import IterableDataset, load_dataset
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast, default_data_collator

BUFFER = 1000


class HfStreaming:
    """Contestant with torchdata's loader; `set_epoch` starts each epoch."""

    def __init__(self, dataset: IterableDataset, settings: Settings) -> None:
        self.dataset = dataset
        self.settings = settings
        self.epoch = 0
        self.loader = _make_loader(dataset, settings)
        self.batches: Any = None

    def next(self) -> NDArray[np.int32]:
        if self.batches is None:
            self.batches = iter(self.loader)
        batch = next(self.batches, None)
        if batch is None:
            self._begin_epoch()
            return self.next()
        return batch["input_ids"].numpy().astype(np.int32)

    def _begin_epoch(self) -> None:
        if not self.settings.repeat:
            raise StopIteration
        self.epoch += 1
        self.dataset.set_epoch(self.epoch)
        self.batches = iter(self.loader)

    def state(self) -> bytes:
        return pickle.dumps((self.epoch, self.loader.state_dict()))

    def restore(self, state: bytes) -> None:
        self.epoch, loader = pickle.loads(state)
        self.dataset.set_epoch(self.epoch)
        self.loader.load_state_dict(loader)

    def close(self) -> None:
        self.batches = None


def _make_loader(dataset: IterableDataset, settings: Settings) -> Any:
    kind = DataLoader
    if settings.options["stateful"]:
        kind = partial(StatefulDataLoader, snapshot_every_n_steps=500)
    return kind(
        dataset,
        batch_size=ROWS,
        num_workers=settings.workers,
        drop_last=True,
        collate_fn=default_data_collator,
    )


def open_loader(settings: Settings) -> HfStreaming:
    """Open the corpus as a streaming dataset."""
    path = str(settings.tokenizer_folder / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
    eos = tokenizer.convert_tokens_to_ids(EOS[settings.tokenizer])

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*document, eos] for document in ids]}

    def group(documents: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable(documents["input_ids"]))
        end = len(ids) // LENGTH * LENGTH
        return {"input_ids": [ids[i : i + LENGTH] for i in range(0, end, LENGTH)]}

    stream = load_dataset("arrow", data_files=settings.arrow_files, split="train", streaming=True)
    stream = stream.shuffle(seed=settings.seed, buffer_size=BUFFER)
    stream = stream.map(tokenize, batched=True, remove_columns=["text"]).map(group, batched=True)
    return HfStreaming(stream, settings)
