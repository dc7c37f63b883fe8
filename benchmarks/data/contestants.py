"""The contestants and their common interface.

A contestant is a module with `open_loader(settings)`, which returns a `Loader`. Modules import
their libraries at the top, so that the time of `open_loader` excludes imports.
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
    """Contestant and data of one benchmark process."""

    module: str
    scratch: Path
    """Directory with the output of corpus.py."""
    corpus: str = "short"
    tokenizer: str = "bytes"
    workers: int = 0
    """Number of worker processes; 0: no workers."""
    seed: int = 1
    repeat: bool = True
    """Repeat the corpus, if the loader supports both."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the contestant."""

    @property
    def arrow_files(self) -> list[str]:
        """Return the files of the corpus in the Arrow stream format of `datasets`.

        Without workers it is one file, because some peers slow down with each file. With workers
        there are several, because some peers distribute files to workers.
        """
        layout = self.scratch / "corpora" / self.corpus / ("many" if self.workers else "one")
        return sorted(map(str, layout.glob("[0-9]*.arrow")))

    @property
    def tokenizer_folder(self) -> Path:
        """Return the directory of tokenizer.json and, for `pieces`, tokenizer.model."""
        return self.scratch / "tokenizers" / self.tokenizer


class Loader(Protocol):
    """Interface of the loaders that `open_loader` returns."""

    def next(self) -> NDArray[np.int32]:
        """Return the next batch, token ids [16, 2048]; raise StopIteration after the corpus."""

    def state(self) -> bytes:
        """Return the state after the last batch, as this loader stores it in a checkpoint."""

    def restore(self, state: bytes) -> None:
        """Continue after the batch of `state` in a new loader with the same settings."""

    def close(self) -> None:
        """Stop the threads and processes of the loader."""


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
"""Module and options by the name in tables."""


def make_settings(name: str, scratch: Path, **changes: Any) -> Settings:
    """Return the settings of a contestant."""
    module, options = CONTESTANTS[name]
    return replace(Settings(module, scratch, options=options), **changes)


def load_module(settings: Settings) -> Any:
    """Import a contestant and its libraries."""
    return importlib.import_module(settings.module)
