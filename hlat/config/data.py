"""Location of the text, mixture of sources, and tokenizer."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from hlat.config.bounds import bounded


class EncoderLibrary(Enum):
    """Libraries that convert text to token ids; the ids are the same."""

    reference = "reference"
    """The library `tokenizers`, which defines the meaning of a tokenizer.json."""
    fast = "fast"
    """gigatoken (`pip install hlat[fast]`), compared with the reference before its first use."""


@dataclass
class SourceConfig:
    """One source of documents."""

    paths: list[str] = MISSING
    """Arrow or Parquet files, directories, globs, or URLs of these, relative to data.root. A
    directory stands for its *.arrow or *.parquet files (both in one directory are an error) without
    those of subdirectories, or for the output of `save_to_disk` of Hugging Face datasets.
    Uncompressed Arrow is memory-mapped in place; other formats are converted once, into the cache
    directory. `embedded:<name>` is part of the embedded corpus."""
    weight: float = bounded(1.0, min=0, below=float("inf"))
    """Fraction of tokens relative to the other sources."""
    heldout_paths: list[str] = field(default_factory=list)
    """Files of the held-out documents, such as those that `hlat prepare heldout=` writes; no
    document of `paths` is then held out. Empty: data.heldout_documents of `paths`."""
    text_column: str | None = None
    """String column with one document per row; null: data.text_column."""


@dataclass
class DataConfig:
    """The corpus of a run."""

    name: str = MISSING
    """Short name, used in reports."""
    root: str = "."
    """Directory to which relative paths refer."""
    sources: dict[str, SourceConfig] = MISSING
    """The sources by name; name and content seed the shuffle, so renaming a source reorders it."""
    domains: str | None = None
    """Directory, relative to data.root, with one directory of Arrow or Parquet files per source, as
    `hlat prepare DIR domains=true` writes. They replace data.sources of the preset, with the bytes
    of their files as weights, and data.name is the name of the directory; composition sets this
    key to null. data.sources.NAME.weight=X changes a weight."""
    heldout_domains: str | None = None
    """The same with held-out documents: each directory has the name of a source and becomes its
    heldout_paths; composition sets this key to null."""
    text_column: str = "text"
    """String column with one document per row."""
    tokenizer: str = MISSING
    """A tokenizer.json, relative to data.root; `embedded` is the one shipped with hlat."""
    eos_token: str = MISSING
    """Token appended to each document."""
    bos_token: str | None = None
    """Token before each document, which may be the EOS token; null: none, as in HLAT."""
    document_mask: bool = False
    """Restrict attention to one document, and restart positions at 0 in each document; false:
    attention crosses documents, as in HLAT."""
    loss_mask: bool = False
    """Exclude the first token of each document from the loss, in the sum and in the denominator of
    the mean."""
    encoder: EncoderLibrary = EncoderLibrary.reference
    """Library that converts text to token ids; affects the speed only."""
    heldout_documents: int = bounded(32, min=1)
    """Documents per source without heldout_paths that are reserved for evaluation."""
    workers: int = bounded(1, min=0)
    """Processes per data-parallel rank that tokenize ahead of the step, one core each; 0: a thread
    of the trainer tokenizes."""
    prefetch: int = bounded(2, min=0)
    """Batches prepared ahead of the step that consumes them; 0: prepare in step."""
    warn_epochs: float = bounded(4.0, above=0, below=float("inf"))
    """Passes over a source above which a run warns: repeating data up to four times costs next to
    nothing (Muennighoff et al., Scaling data-constrained language models, 2023)."""
    max_lost_text: float = bounded(0.01, min=0, max=1)
    """Fraction of the UTF-8 bytes of held-out text that the tokenizer may lose: characters that
    have no token, or that its normalizer changes. Measured on the start of 16 documents of each
    source."""
    allow_changed: list[str] = field(default_factory=list)
    """Keys that may differ from those of the checkpoint to resume, such as data.tokenizer or
    data.sources.<name>; partially consumed documents are then skipped."""
    preview: int = bounded(0, min=0)
    """Number of sequences to print, with document boundaries, instead of training."""
