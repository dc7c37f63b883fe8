"""Implementation of the loader of the released HLAT scripts, from a description of its algorithm.

One rank of `ExamplePackDataset` selects documents of a shuffled `datasets.Dataset` one at a time
until they have a batch of whitespace words. It tokenizes them, appends an EOS to each, and
concatenates them with the remaining tokens of the previous batch. It runs in the training process,
without workers or prefetching, as for the 70B model. The order (a fixed first shuffle, then one in
place per epoch; on resume one shuffle of the unshuffled index) and the state (cursor, epoch,
remaining tokens) are those of the original. Omitted: splitting documents of more than 500,000
characters, which this corpus does not have, and the rendezvous of ranks. Added: `repeat=False`.
"""

import os
import pickle
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from contestants import EOS, LENGTH, ROWS, Settings
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

FIRST_SEED = 1234
Batch = dict[str, torch.Tensor]


class PackedExamples(IterableDataset):
    """Packed batches, by default without end; counts words instead of tokens, as the original."""

    def __init__(
        self, dataset: datasets.Dataset, tokenizer: Any, eos: int, repeat: bool = True
    ) -> None:
        self.dataset = dataset.shuffle(seed=FIRST_SEED, keep_in_memory=True)
        self.tokenizer = tokenizer
        self.eos = eos
        self.repeat = repeat
        self.index = np.arange(len(dataset), dtype=np.uint32)
        self.cursor = 0
        self.epoch = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        num_tokens = ROWS * LENGTH
        while True:
            while len(self.buffer) < num_tokens:
                documents = self._read(num_tokens - len(self.buffer))
                if not documents:
                    return
                self.buffer = self.buffer + self._tokenize(documents)
            tokens, self.buffer = self.buffer[:num_tokens], self.buffer[num_tokens:]
            ids = torch.tensor(tokens, dtype=torch.long).reshape(ROWS, LENGTH)
            yield {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}

    def _read(self, num_remaining: int) -> list[str]:
        documents: list[str] = []
        while num_remaining > 0:
            if self.cursor == len(self.index):
                if not self.repeat:
                    break
                self._begin_epoch()
            row = int(self.index[self.cursor])
            documents.append(self.dataset.select([row])["text"][0])
            num_remaining -= len(documents[-1].split())
            self.cursor += 1
        return documents

    def _begin_epoch(self) -> None:
        self.cursor = 0
        self.epoch += 1
        self._shuffle()

    def _shuffle(self) -> None:
        np.random.seed(FIRST_SEED + self.epoch)
        np.random.shuffle(self.index)

    def _tokenize(self, documents: list[str]) -> list[int]:
        tokens: list[int] = []
        for ids in self.tokenizer(documents, add_special_tokens=False)["input_ids"]:
            tokens += [*ids, self.eos]
        return tokens

    def resume(self, cursor: int, epoch: int, buffer: list[int]) -> None:
        """Shuffle the unshuffled index once in any epoch after the first."""
        self.cursor, self.epoch, self.buffer = cursor, epoch, buffer
        self.index = np.arange(len(self.index), dtype=np.uint32)
        if epoch:
            self._shuffle()


class Released:
    """Contestant with the DataLoader of the released scripts."""

    def __init__(self, examples: PackedExamples, keep_buffer: bool) -> None:
        self.examples = examples
        self.keep_buffer = keep_buffer
        self.batches = iter(DataLoader(examples, batch_size=None, num_workers=0))

    def next(self) -> NDArray[np.int32]:
        return next(self.batches)["input_ids"].numpy().astype(np.int32)

    def state(self) -> bytes:
        return pickle.dumps((self.examples.cursor, self.examples.epoch, self.examples.buffer))

    def restore(self, state: bytes) -> None:
        """Restore the position; the 70B script by default drops the remaining tokens."""
        cursor, epoch, buffer = pickle.loads(state)
        self.examples.resume(cursor, epoch, buffer if self.keep_buffer else [])

    def close(self) -> None:
        pass


def open_loader(settings: Settings) -> Released:
    """Open the Arrow files without a copy."""
    if settings.workers:
        raise NotImplementedError("the released scripts use no workers")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = settings.tokenizer_folder
    tokenizer: Any
    if settings.options["slow"]:
        tokenizer = LlamaTokenizer(str(folder / "tokenizer.model"), legacy=False)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    eos = tokenizer.convert_tokens_to_ids(EOS[settings.tokenizer])
    files = [datasets.Dataset.from_file(path) for path in settings.arrow_files]
    examples = PackedExamples(datasets.concatenate_datasets(files), tokenizer, eos, settings.repeat)
    return Released(examples, settings.options.get("keep_buffer", True))
