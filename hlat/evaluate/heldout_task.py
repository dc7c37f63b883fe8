"""Held-out loss of a model: on the held-out sets of its run or of another run, or on other text.

On the held-out sets of its run, the result of a checkpoint is that of the evaluation during
training.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section
from hlat.config.data import DataConfig
from hlat.config.evaluation import EvaluationConfig
from hlat.config.recorded_config import select_yaml_values
from hlat.config.run import Config
from hlat.data.data_source import open_data_sources
from hlat.data.heldout_sequences import HeldoutSequences, pack_documents, pack_heldout_sequences
from hlat.data.tokenizer import Tokenizer
from hlat.data.tokenizer_round_trip import sample_texts
from hlat.distributed import rank_environment
from hlat.inference.inference_model import MAX_BATCH_TOKENS
from hlat.inference.model_source import ModelSource
from hlat.prepare.document_reader import DamagedDocument, parse_documents
from hlat.prepare.input_files import InputReader, find_input_files

_KEYS = (
    "data",
    "batch.micro_batch_size",
    "batch.global_batch_size",
    "run.seed",
    "run.data_seed",
    "evaluation.tokens_per_source",
    "evaluation.sequences_per_source",
)


@dataclass(frozen=True)
class HeldoutData:
    """Sequences by source, and the settings of the forward pass that the loss depends on."""

    sources: Mapping[str, HeldoutSequences]
    data: DataConfig
    micro_batch_size: int

    @property
    def num_sequences(self) -> int:
        """Sequences of all sources."""
        return sum(len(source.sequences.tokens) for source in self.sources.values())

    def apply_to(self, config: Config) -> Config:
        """Return the configuration of an engine that computes the loss as in training."""
        batch = dataclasses.replace(config.batch, micro_batch_size=self.micro_batch_size)
        return dataclasses.replace(config, data=self.data, batch=batch)


def load_heldout_data(
    source: ModelSource,
    location: str | None = None,
    overrides: Sequence[str] = (),
    limit: int | None = None,
) -> HeldoutData:
    """Load the data for the held-out loss of a model; raise ConfigError if there is none.

    Args:
        source: The model.
        location: Run whose held-out sets are used, or file or directory of text; None: the run of
            the model.
        overrides: Overrides of the recorded `data` and `evaluation` settings.
        limit: Number of sequences of each source; None: those of the last evaluation of the run,
            or all of a text.
    """
    yaml, label = source.config_yaml, str(source.location)
    if location is not None:
        run_config = Path(location).expanduser() / "config.yaml"
        if not run_config.is_file():
            return _load_text(source, location, overrides, limit)
        yaml, label = run_config.read_text(), str(run_config)
    if not yaml:
        raise ConfigError(
            f"{label} records no data; give heldout=PATH: a run, or a file or directory of text"
        )
    data, micro, global_size, seed, evaluation = _parse_settings(yaml, label, overrides)
    num_sequences = limit or evaluation.count_sequences(source.sequence_length)
    tokenizer, data_sources = _build_tokenizer(source), open_data_sources(data, seed)
    for name, data_source in data_sources.items():
        _warn_of_lost_text(tokenizer, name, data_source.read_heldout_documents())
    sources = {
        name: pack_heldout_sequences(
            data_source, tokenizer, num_sequences, source.sequence_length, data
        )
        for name, data_source in data_sources.items()
    }
    return HeldoutData(sources, data, micro or global_size)


def _parse_settings(
    yaml: str, label: str, overrides: Sequence[str]
) -> tuple[DataConfig, int | None, int, int, EvaluationConfig]:
    fields, *numbers = select_yaml_values(yaml, label, *_KEYS, overrides=overrides)
    try:
        data = parse_section(DataConfig, dict(fields))
        micro, global_size, run_seed, data_seed, num_tokens, num_sequences = (
            number if number is None else int(number) for number in numbers
        )
        # A run of an earlier version has no tokens_per_source
        evaluation = EvaluationConfig(
            tokens_per_source=num_tokens or EvaluationConfig.tokens_per_source,
            sequences_per_source=num_sequences,
        )
        seed = run_seed if data_seed is None else data_seed
        if global_size is None or seed is None:
            raise ValueError("batch.global_batch_size or run.seed is missing")
        return data, micro, global_size, seed, evaluation
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{label}: its recorded data settings are invalid ({error})") from error


def _load_text(
    source: ModelSource, location: str, overrides: Sequence[str], limit: int | None
) -> HeldoutData:
    """Pack all documents of a file or directory."""
    if overrides:
        raise ConfigError(
            f"{overrides[0]} changes the data of a run, and heldout={location} is none; remove it"
        )
    data = DataConfig(name="text", sources={}, tokenizer="", eos_token=source.tokenizer.eos_token)
    if source.config_yaml:
        recorded, *_ = _parse_settings(source.config_yaml, str(source.location), ())
        data = dataclasses.replace(
            data, document_mask=recorded.document_mask, loss_mask=recorded.loss_mask
        )
    tokenizer = _build_tokenizer(source)
    _warn_of_lost_text(tokenizer, location, _read_documents(location))
    sequences = pack_documents(
        _read_documents(location),
        tokenizer,
        limit,
        source.sequence_length,
        data,
        f"heldout={location}: its documents",
        "give more text",
    )
    micro_batch_size = max(1, MAX_BATCH_TOKENS // source.sequence_length)
    return HeldoutData({Path(location).name or location: sequences}, data, micro_batch_size)


def _warn_of_lost_text(tokenizer: Tokenizer, name: str, documents: Iterator[str]) -> None:
    """Print a warning if the tokenizer loses a part of the first documents of `name`."""
    lost = tokenizer.measure_lost_text(sample_texts(documents))
    if lost.num_lost and rank_environment.read_rank_info().is_rank0:
        print(
            f"WARNING: the tokenizer loses {lost} of the held-out text of {name}", file=sys.stderr
        )


def _read_documents(location: str) -> Iterator[str]:
    for file in find_input_files([location]):
        with InputReader(file.location) as reader:
            for document in parse_documents(reader, file.location, "text"):
                if isinstance(document, DamagedDocument):
                    raise ConfigError(f"{file.location}: {document.location} {document.reason}")
                yield document.decode()


def _build_tokenizer(source: ModelSource) -> Tokenizer:
    """Return the tokenizer of the model as in training, with EOS after each document."""
    prompts = source.tokenizer
    return Tokenizer(
        *(str(prompts.file), ".", prompts.eos_token),
        bos_token=prompts.added_bos_token,
        max_lost_text=1.0,
    )
