"""torchtitan's Grain loader from its main branch (commit b5bcd76, see requirements.txt).

Configured as in its guide for text (torchtitan/components/data/README.md): a Hugging Face source, a
TextProcessor, concat-then-split packing, defaults of GrainDataLoader. The processor adds a BOS
before each document and drops the EOS from the inputs, so the number of tokens is the same.
"""

import pickle

import numpy as np
from contestants import LENGTH, ROWS, Settings
from numpy.typing import NDArray
from peers import use_torchtitan

use_torchtitan("main")

from torchtitan.components.data import (  # noqa: E402
    ConcatThenSplitPackingConfig,
    GrainDataLoader,
    HuggingFaceRandomAccessSource,
    HuggingFaceStreamingSource,
    SingleDatasetConfig,
)
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.hf_datasets.text_datasets import TextProcessor  # noqa: E402


class TitanMain:
    """Contestant with GrainDataLoader, which packs a batch as one row; `next` splits it."""

    def __init__(self, loader: GrainDataLoader) -> None:
        self.loader = loader
        self.batches = iter(loader)

    def next(self) -> NDArray[np.int32]:
        inputs, _ = next(self.batches)
        return inputs["input"].numpy().reshape(ROWS, LENGTH).astype(np.int32)

    def state(self) -> bytes:
        return pickle.dumps(self.loader.state_dict())

    def restore(self, state: bytes) -> None:
        self.loader.load_state_dict(pickle.loads(state))

    def close(self) -> None:
        self.loader.close()


def open_loader(settings: Settings) -> TitanMain:
    """Open the map or the streaming loader."""
    if settings.workers:
        raise NotImplementedError("torchtitan's Grain loader has threads, not worker processes")
    streaming = settings.options["streaming"]
    kind = HuggingFaceStreamingSource if streaming else HuggingFaceRandomAccessSource
    source = kind.Config(
        path="arrow", split="train", load_dataset_kwargs={"data_files": settings.arrow_files}
    )
    documents = SingleDatasetConfig(
        source=source,
        processor=TextProcessor.Config(),
        post_filters=(lambda sample: sample is not None,),
    )
    config = GrainDataLoader.Config(
        dataset=ConcatThenSplitPackingConfig(dataset=documents),
        seed=settings.seed,
        repeat=settings.repeat,
    )
    loader = GrainDataLoader(
        config,
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(settings.tokenizer_folder)),
        max_context_length=LENGTH,
        num_tokens_per_batch=ROWS * LENGTH,
    )
    return TitanMain(loader)
