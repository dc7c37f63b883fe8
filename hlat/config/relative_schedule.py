"""Length of a run relative to its model: tokens per parameter, or FLOPs of the run.

The steps are computed when a configuration is composed, so that a run records and is named after
its steps: equal runs of studies with different axes are one run.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hlat.config.batch import BatchConfig
from hlat.config.bounds import find_bounds_violations
from hlat.config.config_errors import raise_config_errors
from hlat.config.model import ModelConfig
from hlat.config.override_keys import parse_override_key
from hlat.config.schedule import RELATIVE_FIELDS, ScheduleConfig
from hlat.model.decoder_spec import compute_flops_per_token, count_parameters

_LENGTHS = RELATIVE_FIELDS[:2]


def apply_run_length(config: DictConfig, overrides: Sequence[str]) -> None:
    """Replace relative settings of a composed schedule by total_steps and warmup_steps.

    Raises:
        ConfigError: A relative setting is invalid, or conflicts with another one or with an
            override of the steps.
    """
    schedule: Any = config.get("schedule")
    if schedule is None or all(schedule.get(key) is None for key in RELATIVE_FIELDS):
        return
    raise_config_errors(_find_problems(schedule, overrides))
    if any(schedule.get(key) is not None for key in _LENGTHS):
        schedule.total_steps = _count_steps(config)
    if schedule.warmup_fraction is not None:
        schedule.warmup_steps = round(schedule.warmup_fraction * schedule.total_steps)
    for key in RELATIVE_FIELDS:
        schedule[key] = None


def _count_steps(config: DictConfig) -> int:
    """Return the full batches of the run, at least 1."""
    model: Any = OmegaConf.to_object(config.model)
    batch: Any = OmegaConf.to_object(config.batch)
    assert isinstance(model, ModelConfig)
    assert isinstance(batch, BatchConfig)
    schedule = config.schedule
    if schedule.tokens_per_parameter is not None:
        tokens = schedule.tokens_per_parameter * count_parameters(model)
    else:
        tokens = schedule.training_flops / compute_flops_per_token(model, batch.sequence_length)
    return max(1, round(float(tokens) / batch.tokens_per_step))


def _find_problems(schedule: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    typed = {parse_override_key(override) for override in overrides}
    given = {key: schedule.get(key) for key in _LENGTHS if schedule.get(key) is not None}
    relative: Any = OmegaConf.to_object(
        OmegaConf.merge(
            OmegaConf.structured(ScheduleConfig),
            {key: schedule.get(key) for key in RELATIVE_FIELDS},
            {"name": "linear", "warmup_steps": 0, "total_steps": 1},
        )
    )
    yield from find_bounds_violations(relative, "schedule.")
    if len(given) > 1:
        both = " and ".join(f"schedule.{key}={value:g}" for key, value in given.items())
        yield f"{both} both set the length of the run; set one of them to null"
    pairs = [("total_steps", key) for key in given]
    if schedule.warmup_fraction is not None:
        pairs.append(("warmup_steps", "warmup_fraction"))
    for steps, key in pairs:
        if f"schedule.{steps}" in typed:
            yield (
                f"schedule.{steps}={schedule.get(steps)} and schedule.{key}={schedule.get(key):g} "
                f"conflict; remove the first, or add schedule.{key}=null"
            )
