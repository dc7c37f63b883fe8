"""hlat's loader, used as in the training loop."""

import json

import numpy as np
from contestants import EOS, LENGTH, ROWS, Settings
from numpy.typing import NDArray

from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig, EncoderLibrary, SourceConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data.data_loader import DataLoader
from hlat.data.data_loader import build_data_loader as open_hlat

ROWS_ARE_STREAMS = True
"""Documents continue in the same row of the next batch, not in the next row."""


class Ours:
    """Contestant with one source and one rank."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def next(self) -> NDArray[np.int32]:
        return self.loader.next_batch().tokens

    def state(self) -> bytes:
        return json.dumps(self.loader.state_dict()).encode()

    def restore(self, state: bytes) -> None:
        self.loader.load_state_dict(json.loads(state))

    def close(self) -> None:
        self.loader.close()


def open_loader(settings: Settings) -> Ours:
    """Open the corpus as in a run, without held-out documents, so that an epoch is the corpus."""
    data = DataConfig(
        name="benchmark",
        sources={"text": SourceConfig(paths=settings.arrow_files)},
        tokenizer=str(settings.tokenizer_folder / "tokenizer.json"),
        eos_token=EOS[settings.tokenizer],
        heldout_documents=0,
        encoder=EncoderLibrary(settings.options["encoder"]),
        workers=settings.workers,
        prefetch=settings.options.get("prefetch", DataConfig.prefetch),
    )
    phase = PhaseConfig("benchmark", [PhaseStage("all")])
    return Ours(open_hlat(data, phase, BatchConfig(ROWS, ROWS, LENGTH), settings.seed))
