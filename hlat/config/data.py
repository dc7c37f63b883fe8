"""Where the text lies, how sources are mixed, and which tokenizer reads them."""

from dataclasses import dataclass, field
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
    """Arrow or Parquet files, folders, globs, or URLs of these, relative to data.root. A folder
    means its *.arrow or *.parquet files (one that holds both is refused), not those of folders in
    it, or what `save_to_disk` of Hugging Face datasets wrote. Uncompressed Arrow is mapped where it
    lies; anything else is converted once, into the cache folder. `embedded:<name>` is part of the
    embedded corpus."""
    weight: float = 1.0
    """Share of tokens relative to the other sources."""
    text_column: str | None = None
    """String column that holds a document of this source; null: data.text_column."""


@dataclass
class Data:
    """The corpus of a run."""

    name: str = MISSING
    """Short name, used in reports."""
    root: str = "."
    """Folder that relative paths start from."""
    sources: dict[str, Source] = MISSING
    """The sources by name; name and content key the shuffle, so renaming a source reorders it."""
    text_column: str = "text"
    """String column that holds a document."""
    tokenizer: str = MISSING
    """A tokenizer.json, relative to data.root; `embedded` is the one shipped with hlat."""
    eos_token: str = MISSING
    """Token written after each document; no BOS is written, as in HLAT."""
    document_mask: bool = False
    """Attention stays inside a document, and positions restart at 0 in each document of a sequence;
    false: attention crosses documents, as in HLAT."""
    loss_mask: bool = False
    """The first token of a document is not predicted from the end of the one before: it counts
    neither in the sum of the loss nor in the mean's denominator."""
    encoder: Encoder = Encoder.reference
    """Library that turns text into token ids; changes the speed and no id."""
    heldout_documents: int = 32
    """Documents per source that evaluation reads and training never does."""
    workers: int = 1
    """Processes per data-parallel rank that tokenise ahead of the step, one core each; 0: a thread
    of the trainer does."""
    prefetch: int = 2
    """Batches prepared ahead of the step that consumes them; 0: prepare in step."""
    warn_epochs: float = 4.0
    """Passes over a source above which a run warns: repeating data up to four times costs next to
    nothing (Muennighoff et al., Scaling data-constrained language models, 2023)."""
    allow_changed: list[str] = field(default_factory=list)
    """Keys that may differ from those a checkpoint was written with, such as data.tokenizer or
    data.sources.<name>; the documents that stood open then are left."""
    preview: int = 0
    """Sequences to print, with the borders of their documents, in place of training."""
