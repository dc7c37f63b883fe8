"""Settings that determine the documents of a preparation, besides its inputs."""

from dataclasses import dataclass, field
from typing import Any

from hlat.prepare.document_filters import FilterSettings

TRAIN = "train"
HELDOUT = "heldout"


@dataclass(frozen=True)
class DocumentSettings:
    """Division into documents, filters, deduplication and held-out documents."""

    separator: str | None = None
    """Text between the documents of text files; None: a file is one document."""
    encoding: str | None = None
    """Encoding of text that is not UTF-8, UTF-16 or UTF-32; None: such documents are damaged."""
    filters: FilterSettings = field(default_factory=FilterSettings)
    dedup: str | None = None
    """`exact` or `minhash`; None: keep duplicates."""
    heldout: float | None = None
    """Fraction of documents for a separate held-out directory; None: no such directory."""
    seed: int = 0
    """Seed of the choice of held-out documents."""

    @property
    def needs_signatures(self) -> bool:
        """True if the selection of documents depends on other documents or on digests."""
        return self.dedup is not None or self.heldout is not None

    @property
    def needs_minhash(self) -> bool:
        """True if signatures have MinHash values."""
        return self.dedup == "minhash"

    def to_json(self) -> dict[str, Any]:
        """Return the settings of the command line that are set."""
        settings = {
            "separator": self.separator,
            "encoding": self.encoding,
            **self.filters.to_json(),
            "dedup": self.dedup,
            "heldout": self.heldout,
            "seed": self.seed,
        }
        return {name: value for name, value in settings.items() if value}
