"""Facts in the header of a page: size of the model, learning rate, batch and hardware."""

from collections.abc import Sequence

from hlat.config.batch_steps import format_growth
from hlat.model.decoder_spec import count_parameters
from hlat.study.run_record import RunRecord, get_number
from hlat.tracking.text_format import UNKNOWN, format_count, format_short

_MAX_VALUES = 4
"""Maximum number of different values that a comparison lists."""


def build_run_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return names and values, and what changed during the run.

    The values, which are those of the last attempt, are missing if the configuration cannot be
    parsed.
    """
    changes = record.setting_changes.items()
    return _list_facts(record) + [
        (f"Changed at step {step}", "; ".join(lines)) for step, lines in changes
    ]


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


def _list_facts(record: RunRecord) -> list[tuple[str, str]]:
    settings = record.model_settings
    if settings is None:
        return []
    batch, hardware, recorded = settings.batch, settings.hardware, record.flat_config
    sequences = f"{format_count(batch.global_batch_size)} x {format_count(batch.sequence_length)}"
    tokens = f"{format_count(batch.tokens_per_step)} tokens"
    nodes = f"{hardware.nodes} x " if hardware.nodes > 1 else ""
    return [
        ("Model", settings.model.name),
        ("Parameters", format_short(count_parameters(settings.model))),
        ("Learning rate", format_short(get_number(recorded, "optimizer.lr"))),
        ("Schedule", str(recorded.get("schedule.name", UNKNOWN))),
        ("Batch", f"{sequences} = {tokens}{format_growth(batch)}"),
        ("Optimizer", str(recorded.get("optimizer.name", UNKNOWN))),
        ("Precision", str(recorded.get("precision.name", UNKNOWN))),
        ("Hardware", f"{nodes}{hardware.name}"),
        ("Seed", str(recorded.get("run.seed", UNKNOWN))),
    ]
