"""Where the text lies, how sources are mixed, and which tokenizer reads them."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class Encoder(Enum):
    """Libraries that turn text into token ids; the ids are the same."""

    reference = "reference"
    """The library `tokenizers`, which defines what a tokenizer.json means."""
    fast = "fast"
    """gigatoken (`pip install hlat[fast]`), compared with the reference before its first use."""


@dataclass
class Source:
    """One source of documents."""

    paths: list[str] = MISSING
    """Arrow files, folders of them, or globs, relative to data.root; `embedded:<name>` is part of
    the embedded corpus."""
    weight: float = 1.0
    """Share of tokens relative to the other sources."""


@dataclass
class Data:
    """The corpus of a run."""

    name: str = MISSING
    """Short name, used in reports."""
    root: str = "."
    """Folder that relative paths start from."""
    sources: dict[str, Source] = MISSING
    """The sources by name; the name keys the shuffle, so renaming a source reorders it."""
    text_column: str = "text"
    """String column that holds a document."""
    tokenizer: str = MISSING
    """A tokenizer.json, relative to data.root; `embedded` is the one shipped with hlat."""
    eos_token: str = MISSING
    """Token written after each document; no BOS is written, as in HLAT."""
    encoder: Encoder = Encoder.reference
    """Library that turns text into token ids; changes the speed and no id."""
    heldout_documents: int = 32
    """Documents per source that evaluation reads and training never does."""
    prefetch: int = 2
    """Batches prepared ahead of the step that consumes them; 0: prepare in step."""
