"""Loader of torchtitan's last release, 0.3.0, which uses `datasets` and torchdata.

The dataset is registered as in its guide (docs/datasets.md). The map loader does not shuffle its
first epoch, the streaming loader shuffles none. As in its trainer, snapshot_every_n_steps is the
checkpoint interval, by default 500.
"""

import logging
import pickle
from functools import partial
from typing import Any

import numpy as np
from contestants import LENGTH, ROWS, Settings
from numpy.typing import NDArray
from peers import use_torchtitan

use_torchtitan("0.3.0")

from datasets import load_dataset  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader  # noqa: E402

CHECKPOINT_INTERVAL = 500


def _load(path: str, files: list[str], streaming: bool) -> Any:
    return load_dataset(path, data_files=files, split="train", streaming=streaming)


class TitanRelease:
    """Contestant with HuggingFaceTextDataLoader."""

    def __init__(self, loader: HuggingFaceTextDataLoader) -> None:
        self.loader = loader
        self.batches: Any = None

    def next(self) -> NDArray[np.int32]:
        if self.batches is None:
            self.batches = iter(self.loader)
        inputs, _ = next(self.batches)
        if len(inputs["input"]) < ROWS:
            raise StopIteration
        return inputs["input"].numpy().astype(np.int32)

    def state(self) -> bytes:
        return pickle.dumps(self.loader.state_dict())

    def restore(self, state: bytes) -> None:
        self.loader.load_state_dict(pickle.loads(state))
        self.batches = None

    def close(self) -> None:
        self.batches = None


def open_loader(settings: Settings) -> TitanRelease:
    """Open the map or the streaming loader."""
    logging.getLogger().setLevel(logging.ERROR)
    streaming = settings.options["streaming"]
    if settings.workers and not streaming:
        raise NotImplementedError("each worker of the map path would read the whole corpus")
    DATASETS["benchmark"] = DatasetConfig(
        path="arrow",
        loader=partial(_load, files=settings.arrow_files, streaming=streaming),
        sample_processor=lambda sample: sample["text"],
    )
    loader = HuggingFaceTextDataLoader(
        HuggingFaceTextDataLoader.Config(
            dataset="benchmark", infinite=settings.repeat, num_workers=settings.workers
        ),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(settings.tokenizer_folder)),
        seq_len=LENGTH,
        local_batch_size=ROWS,
        snapshot_every_n_steps=CHECKPOINT_INTERVAL,
    )
    return TitanRelease(loader)
