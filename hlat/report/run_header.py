"""Facts in the header of a page: size of the model, learning rate, batch and hardware."""

from collections.abc import Sequence

from hlat.config.batch_steps import format_growth
from hlat.config.run import Config
from hlat.model.decoder_spec import count_parameters
from hlat.study.run_record import RunRecord
from hlat.tracking.text_format import format_count, format_short

_MAX_VALUES = 4
"""Maximum number of different values that a comparison lists."""


def build_run_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return names and values, and what changed during the run.

    The values, which are those of the last attempt, are missing if the configuration cannot be
    parsed.
    """
    facts = [] if record.parsed_config is None else _list_facts(record.parsed_config)
    changes = record.setting_changes.items()
    return facts + [(f"Changed at step {step}", "; ".join(lines)) for step, lines in changes]


def build_shared_facts(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the facts of several runs; different values are listed, or counted."""
    columns: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in build_run_facts(record):
            columns.setdefault(name, {})[value] = None
    return [
        (name, " | ".join(values) if len(values) <= _MAX_VALUES else f"{len(values)} values")
        for name, values in columns.items()
    ]


def _list_facts(config: Config) -> list[tuple[str, str]]:
    batch, optimizer, hardware = config.batch, config.optimizer, config.hardware
    sequences = f"{format_count(batch.global_batch_size)} x {format_count(batch.sequence_length)}"
    tokens = f"{format_count(batch.tokens_per_step)} tokens"
    nodes = f"{hardware.nodes} x " if hardware.nodes > 1 else ""
    return [
        ("Model", config.model.name),
        ("Parameters", format_short(count_parameters(config.model))),
        ("Learning rate", format_short(optimizer.lr)),
        ("Schedule", config.schedule.name),
        ("Batch", f"{sequences} = {tokens}{format_growth(batch)}"),
        ("Optimizer", optimizer.name),
        ("Precision", config.precision.name),
        ("Hardware", f"{nodes}{hardware.name}"),
        ("Seed", str(config.run.seed)),
    ]
