"""Where the text lies, how sources are mixed, and which tokenizer reads them."""

from dataclasses import dataclass

from omegaconf import MISSING


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
    heldout_documents: int = 32
    """Documents per source that evaluation reads and training never does."""
    prefetch: int = 2
    """Batches prepared ahead of the step that consumes them; 0: prepare in step."""
