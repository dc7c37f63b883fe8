"""hlat's own loader, through the two calls that a training loop makes."""

import json
from dataclasses import fields
from typing import Any

import numpy as np
from contestants import EOS, LENGTH, ROWS, Settings
from numpy.typing import NDArray

from hlat.config.batch import Batch
from hlat.config.data import Data, Source
from hlat.config.phase import Phase, Stage
from hlat.data.loader import Loader
from hlat.data.loader import open_loader as open_hlat

ROWS_ARE_STREAMS = True
"""Documents go on in the same row of the next batch, not in the next row."""


class Ours:
    """Batches of a run with one source and one rank."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def next(self) -> NDArray[np.int32]:
        batch: Any = self.loader.next()
        return getattr(batch, "tokens", batch)

    def state(self) -> bytes:
        return json.dumps(self.loader.state()).encode()

    def restore(self, state: bytes) -> None:
        self.loader.restore(json.loads(state))

    def close(self) -> None:
        self.loader.close()


def open_loader(settings: Settings) -> Ours:
    """Open the corpus as a run does; nothing is held out, so that an epoch is the corpus."""
    wanted = {"encoder": settings.options["encoder"], "workers": settings.workers}
    data = Data(
        name="benchmark",
        sources={"text": Source(paths=settings.arrow_files)},
        tokenizer=str(settings.tokenizer_folder / "tokenizer.json"),
        eos_token=EOS[settings.tokenizer],
        heldout_documents=0,
        **_offered(wanted),
    )
    phase = Phase("benchmark", [Stage("all")])
    return Ours(open_hlat(data, phase, Batch(ROWS, ROWS, LENGTH), settings.seed))


def _offered(wanted: dict[str, Any]) -> dict[str, Any]:
    """The fields that this hlat has; refuse to measure something other than what was asked for."""
    names = {field.name for field in fields(Data)}
    default = {"encoder": "reference", "workers": 0}
    if missing := [name for name in wanted if name not in names and wanted[name] != default[name]]:
        raise NotImplementedError(f"this hlat has no data.{', data.'.join(missing)}")
    return {name: value for name, value in wanted.items() if name in names}
