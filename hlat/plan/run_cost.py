"""FLOPs and duration of a run, as sums over the batch shapes of its steps."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hlat.config.batch import BatchConfig
from hlat.config.batch_steps import list_batch_shapes
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan.step_time import StepTime


def compute_run_flops(config: Config) -> float:
    """Return the FLOPs of a run, without those of the optimizer."""
    return sum(
        num_steps
        * one.batch.tokens_per_step
        * compute_flops_per_token(one.model, one.batch.sequence_length)
        for num_steps, one in _iter_shapes(config)
    )


def compute_run_seconds(config: Config, predict: Callable[[Config], StepTime]) -> float:
    """Return the duration of a run, given a function that returns the time of a step."""
    return sum(num_steps * predict(one).total for num_steps, one in _iter_shapes(config))


def _iter_shapes(config: Config) -> Iterator[tuple[int, Config]]:
    """Yield the steps of each batch shape, and the configuration with this shape in all steps."""
    for num_steps, size, length in list_batch_shapes(compute_total_steps(config), config.batch):
        parts = config.batch.sequence_length // length
        batch = BatchConfig(size * parts, config.micro_batch_size * parts, length)
        yield num_steps, replace(config, batch=batch)
