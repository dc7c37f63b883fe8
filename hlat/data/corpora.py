"""All that a run reads: its sources, its tokenizer, and when they are mixed how.

The trainer and each of its workers open the same corpora from the same settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.phase import Phase
from hlat.data.mixture import Timeline, make_timeline
from hlat.data.source import Source, open_sources
from hlat.data.streams import NUM_FIELDS
from hlat.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpora:
    """What rows are drawn from, and in which mixture."""

    sources: Mapping[str, Source]
    """By name, in alphabetical order."""
    tokenizer: Tokenizer
    timeline: Timeline
    fingerprint: dict[str, Any]
    """What a resumed run must share with the one it resumes, by config key (JSON-able)."""

    @property
    def width(self) -> int:
        """Integers of a row's state."""
        return 2 + NUM_FIELDS * len(self.sources)


def open_corpora(data: Data, phase: Phase, batch: Batch, seed: int) -> Corpora:
    """Open the sources and the tokenizer of a run.

    Raises:
        ConfigError: If a file, column, weight or size does not fit.
    """
    timeline = make_timeline(phase, data, batch)
    tokenizer = Tokenizer(data.tokenizer, data.root, data.eos_token, data.encoder)
    sources = open_sources(data, seed)
    fingerprint = {
        "run.seed": seed,
        "batch.global_batch_size": batch.global_batch_size,
        "batch.sequence_length": batch.sequence_length,
        "data.tokenizer": tokenizer.sha256,
        "data.eos_token": data.eos_token,
        "data.heldout_documents": data.heldout_documents,
        **{f"data.sources.{name}": s.corpus.fingerprint() for name, s in sources.items()},
    }
    return Corpora(sources, tokenizer, timeline, fingerprint)
