"""The open sources, tokenizer and mixture schedule of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.data import DataConfig
from hlat.config.phase import PhaseConfig
from hlat.config.run_identity import collect_data_settings
from hlat.data.data_mixture import MixtureSchedule, build_mixture_schedule
from hlat.data.data_source import DataSource, open_data_sources
from hlat.data.token_streams import NUM_CURSOR_FIELDS
from hlat.data.tokenizer import Tokenizer
from hlat.data.tokenizer_round_trip import LostText, find_lost_text_problem, sample_texts

MAX_COMPARED_BYTES = 4096
"""Bytes, of each sampled document, on which the encoders are compared."""


@dataclass(frozen=True)
class TrainingData:
    """Everything that a trainer or a data worker needs to read token batches."""

    sources: Mapping[str, DataSource]
    """By name, in alphabetical order."""
    tokenizer: Tokenizer
    mixture_schedule: MixtureSchedule
    fingerprint: dict[str, Any]
    """JSON-able values, by config key, that must be equal when a run resumes."""
    lost_text: Mapping[str, LostText]
    """Held-out text that the tokenizer loses, by source."""

    @property
    def state_width(self) -> int:
        """Size of the state of one row, in integers."""
        return 2 + NUM_CURSOR_FIELDS * len(self.sources)


def open_training_data(
    data: DataConfig, phase: PhaseConfig, batch: BatchConfig, seed: int
) -> TrainingData:
    """Open the sources and the tokenizer of a run.

    Raises:
        ConfigError: If a file, column, weight or size is invalid, the fast encoder does not give
            the ids of the reference for the sampled documents, or they have no token, or the
            tokenizer loses too much of the held-out text.
    """
    schedule = build_mixture_schedule(phase, data, batch)
    tokenizer = Tokenizer(
        *(data.tokenizer, data.root, data.eos_token, data.encoder, data.bos_token),
        data.max_lost_text,
    )
    sources = open_data_sources(data, seed)
    lost_text = {}
    for source in sources.values():
        texts = [
            str(document[:MAX_COMPARED_BYTES], "utf-8", "replace")
            for document in source.dataset.sample_documents()
        ]
        tokenizer.validate_encoder(texts)
        _validate_has_tokens(data.tokenizer, tokenizer, source.name, texts)
        heldout = sample_texts(source.read_heldout_documents())
        lost_text[source.name] = tokenizer.measure_lost_text(heldout)
    _validate_lost_text(data, lost_text)
    fingerprint = {
        **collect_data_settings(data, batch, seed),
        "data.tokenizer": tokenizer.sha256,
        **{f"data.sources.{name}": s.compute_fingerprint() for name, s in sources.items()},
    }
    return TrainingData(sources, tokenizer, schedule, fingerprint, lost_text)


def _validate_lost_text(data: DataConfig, lost_text: Mapping[str, LostText]) -> None:
    """Raise ConfigError if the tokenizer loses more than `data.max_lost_text` of a source."""
    problems = [
        find_lost_text_problem(
            f"data.tokenizer={data.tokenizer}",
            f"the held-out text of data.sources.{name}",
            lost,
            data.max_lost_text,
        )
        for name, lost in lost_text.items()
    ]
    raise_config_errors(filter(None, problems))


def _validate_has_tokens(
    name: str, tokenizer: Tokenizer, source: str, documents: Sequence[str]
) -> None:
    """Raise ConfigError if documents have text and no token, since a run would search forever."""
    texts = [document for document in documents if document.strip()]
    if texts and not any(tokenizer.encode_chunks([text])[0].size for text in texts):
        raise ConfigError(
            f"data.tokenizer={name}: {len(texts)} sampled documents of data.sources.{source} have "
            "text and no token; use a tokenizer.json with the characters of the documents"
        )
