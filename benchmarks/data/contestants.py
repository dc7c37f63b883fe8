"""Who takes part, and the one interface through which all are driven.

A contestant is a module with `open_loader(settings)`, which returns an object with `next()` (a
batch of int32 token ids [16, 2048]), `state()` (bytes, as that loader would put into a checkpoint),
`restore(state)` and `close()`. Modules import their libraries at the top, so that a clock that
starts at `open_loader` leaves imports out.
"""

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ROWS = 16
LENGTH = 2048
BOS = {"bytes": "<|begin_of_text|>", "pieces": "<s>"}
EOS = {"bytes": "<|end_of_text|>", "pieces": "</s>"}
"""The tokens before and after a document, by tokenizer (see corpus.py)."""


@dataclass(frozen=True)
class Settings:
    """What one process of a benchmark runs."""

    module: str
    scratch: Path
    """Folder that corpus.py filled."""
    corpus: str = "short"
    tokenizer: str = "bytes"
    workers: int = 0
    """Worker processes; 0: the loader's own process only."""
    seed: int = 1
    repeat: bool = True
    """Begin again when the corpus ends, where the loader has a choice."""
    options: dict[str, Any] = field(default_factory=dict)
    """The contestant's own."""

    @property
    def arrow_files(self) -> list[str]:
        """The corpus in the Arrow stream format that `datasets` itself writes.

        One file, which the peers that slow down with every file like best; with workers many, which
        the peers that share files out to workers need.
        """
        layout = self.scratch / "corpora" / self.corpus / ("many" if self.workers else "one")
        return sorted(map(str, layout.glob("[0-9]*.arrow")))

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with tokenizer.json, tokenizer_config.json and perhaps tokenizer.model."""
        return self.scratch / "tokenizers" / self.tokenizer


class Loader(Protocol):
    """What a contestant's `open_loader` returns."""

    def next(self) -> NDArray[np.int32]:
        """The next batch; StopIteration where the corpus ends and is not repeated."""

    def state(self) -> bytes:
        """What is needed to go on after the last batch."""

    def restore(self, state: bytes) -> None:
        """Go on after the batch that a state follows, in a loader that was opened alike."""

    def close(self) -> None:
        """End the loader's threads and processes."""


CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {"encoder": "reference"}),
    "ours, fast encoder": ("ours", {"encoder": "fast"}),
    "HLAT as released": ("hlat_released", {"slow": True}),
    "HLAT, fast tokenizer": ("hlat_released", {"slow": False}),
    "HLAT, buffer dropped": ("hlat_released", {"slow": False, "keep_buffer": False}),
    "torchtitan main, map": ("titan_main", {"streaming": False}),
    "torchtitan main, streaming": ("titan_main", {"streaming": True}),
    "torchtitan 0.3.0, map": ("titan_release", {"streaming": False}),
    "torchtitan 0.3.0, streaming": ("titan_release", {"streaming": True}),
    "datasets streaming": ("hf_streaming", {"stateful": True}),
    "datasets streaming, not resumable": ("hf_streaming", {"stateful": False}),
    "mosaicml-streaming": ("mosaic", {}),
    "reference encoder alone": ("raw", {"encoder": "reference"}),
    "fast encoder alone": ("raw", {"encoder": "fast"}),
}
"""Module and options by the name that tables show."""


def make_settings(name: str, scratch: Path, **changes: Any) -> Settings:
    """The settings of a contestant."""
    module, options = CONTESTANTS[name]
    return replace(Settings(module, scratch, options=options), **changes)


def load_module(settings: Settings) -> Any:
    """Import a contestant and, with it, all that it needs."""
    return importlib.import_module(settings.module)
