"""Forecast of a run: memory, speed, cost and checkpoint interval.

Values that depend on an unknown peak, price or efficiency are None.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hlat.config import mfu
from hlat.config.batch import BatchConfig
from hlat.config.batch_steps import count_tokens, list_batch_shapes
from hlat.config.config_errors import ConfigError
from hlat.config.data import EncoderLibrary
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.model.decoder_spec import (
    compute_flops_per_token,
    count_active_parameters,
    count_parameters,
)
from hlat.model.mlp_spec import get_mlp_spec
from hlat.plan import failure_model, step_time
from hlat.plan.achieved_speed import get_efficiency
from hlat.plan.hardware_efficiency import UNCALIBRATED_INTERVAL
from hlat.plan.memory_estimate import (
    MemoryEstimate,
    compute_checkpoint_bytes,
    estimate_memory,
    get_device_memory_bytes,
)
from hlat.plan.step_time import StepTime

TOKENS_PER_CORE_SECOND = {EncoderLibrary.reference: 0.59e6, EncoderLibrary.fast: 6.5e6}
"""Tokenization speed of one core, measured end to end (docs/data.md)."""
WRITE_BYTES_PER_S = 1e9
"""Bytes/s of each node to shared storage, assumed; all nodes write at once."""
COPY_BYTES_PER_S = 10e9
"""Bytes/s from devices to host memory per node, assumed: the stall of an asynchronous save."""
_MAX_INTERVAL_IN_MTBFS = 100
"""In mean times between failures: one attempt in e^100 would succeed."""


@dataclass(frozen=True)
class ThroughputForecast:
    """Values derived from the step time; None if peak or price is unknown.

    `step_interval_s` is the 80% interval of the step time, None for an assumed MFU; it is an
    estimate unless `is_calibrated`. `tokens_per_second`, `mfu` and `cost_per_4m_tokens_usd` (HLAT
    paper, section V-F) are those of a full batch; `days` and `cost_usd` those of a run without
    failures; `loader_cores` are the cores per node for tokenization.
    """

    step: StepTime
    step_interval_s: tuple[float, float] | None
    is_calibrated: bool
    tokens_per_second: float
    mfu: float | None
    days: float
    cost_usd: float | None
    cost_per_4m_tokens_usd: float | None
    loader_cores: float

    @property
    def days_interval(self) -> tuple[float, float] | None:
        """Days of the run at the limits of `step_interval_s`."""
        if self.step_interval_s is None:
            return None
        low, high = (self.days * step_s / self.step.total for step_s in self.step_interval_s)
        return low, high


@dataclass(frozen=True)
class CheckpointForecast:
    """Cost of checkpoints at the failure rate that docs/failures.md fits.

    `size` in bytes, `stall_s` the seconds for which a save blocks training; `best_steps` is the
    interval with the highest goodput, `every_steps` the configured one. `mtbf_s` is the assumed
    mean time between failures of all nodes, `recovery_s` that from a failure to the next step.
    """

    size: int
    write_s: float
    stall_s: float
    mtbf_s: float
    recovery_s: float
    best_steps: int
    best_goodput: float
    every_steps: int
    goodput: float


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run; `throughput` and `checkpointing` are None if the step time is unknown.

    `assumed_mfu` is the MFU that the user has assumed for the step time.
    """

    num_parameters: int
    num_active_parameters: int
    steps: int
    tokens: int
    memory: MemoryEstimate
    device_memory_bytes: float
    throughput: ThroughputForecast | None
    checkpointing: CheckpointForecast | None
    unknown_reasons: tuple[str, ...]
    assumed_mfu: float | None = None

    @property
    def fits(self) -> bool:
        """True if the device has enough memory."""
        return self.memory.total <= self.device_memory_bytes


def forecast_run(config: Config, assumed_mfu: float | None = None) -> RunForecast:
    """Return the forecast of a valid configuration.

    `assumed_mfu` replaces the constants of the hardware.
    """
    throughput = checkpointing = None
    unknown_reasons: tuple[str, ...] = ()
    try:
        throughput = _forecast_throughput(config, assumed_mfu)
        checkpointing = _forecast_checkpointing(config, throughput.step.total)
    except ConfigError as error:
        unknown_reasons = tuple(error.problems)
    steps = compute_total_steps(config)
    return RunForecast(
        num_parameters=count_parameters(config.model),
        num_active_parameters=count_active_parameters(config.model),
        steps=steps,
        tokens=count_tokens(steps, config.batch),
        memory=estimate_memory(config),
        device_memory_bytes=get_device_memory_bytes(config),
        throughput=throughput,
        checkpointing=checkpointing,
        unknown_reasons=unknown_reasons,
        assumed_mfu=assumed_mfu,
    )


def _forecast_throughput(config: Config, assumed_mfu: float | None) -> ThroughputForecast:
    predict, interval, is_calibrated = step_time.predict_step_time, None, False
    if assumed_mfu is not None:
        predict = partial(step_time.assume_step_time, assumed_mfu=assumed_mfu)
    hardware, step = config.hardware, predict(config)
    if assumed_mfu is None:
        (low, high), is_calibrated = get_step_interval(config)
        interval = (low * step.total, high * step.total)
    rate = config.batch.tokens_per_step / step.total
    days = compute_run_seconds(config, predict) / 86400
    price = hardware.price_usd_per_hour
    flops = compute_flops_per_token(config.model, config.batch.sequence_length)
    return ThroughputForecast(
        step=step,
        step_interval_s=interval,
        is_calibrated=is_calibrated,
        tokens_per_second=rate,
        mfu=mfu.compute_mfu(
            rate, flops, hardware, config.num_processes, config.precision.compute_dtype
        ),
        days=days,
        cost_usd=None if price is None else days * 24 * hardware.nodes * price,
        cost_per_4m_tokens_usd=mfu.compute_cost_per_4m_tokens(hardware, rate),
        loader_cores=rate / hardware.nodes / TOKENS_PER_CORE_SECOND[config.data.encoder],
    )


def get_step_interval(config: Config) -> tuple[tuple[float, float], bool]:
    """Return the interval relative to the predicted time, and True if it is calibrated.

    No fitted row has experts.
    """
    efficiency = get_efficiency(config)
    if efficiency.is_calibrated and get_mlp_spec(config.model).count_experts(config.model):
        return UNCALIBRATED_INTERVAL, False
    return efficiency.interval, efficiency.is_calibrated


def _forecast_checkpointing(config: Config, step_s: float) -> CheckpointForecast:
    """Return the cost of checkpoints in the scenario with automatic recovery."""
    size = compute_checkpoint_bytes(config)
    node_bytes = size / config.hardware.nodes
    write_s, is_async = node_bytes / WRITE_BYTES_PER_S, config.checkpoint.asynchronous
    stall_s = node_bytes / COPY_BYTES_PER_S if is_async else write_s
    overrides: dict[str, float] = {
        "nodes": config.hardware.nodes,
        "step_s": step_s,
        "save_stall_s": stall_s,
        "save_write_s": write_s if is_async else 0.0,
        "load_s": write_s,
        "every_steps": config.checkpoint.every_steps,
        "steps": compute_total_steps(config),
    }
    scenario, _ = failure_model.build_scenario("automatic", overrides)
    best = failure_model.find_best_interval_steps(scenario)
    is_endless = scenario.interval_s > _MAX_INTERVAL_IN_MTBFS * scenario.mtbf_s
    return CheckpointForecast(
        size=size,
        write_s=write_s,
        stall_s=stall_s,
        mtbf_s=scenario.mtbf_s,
        recovery_s=scenario.idle_s + scenario.reload_s,
        best_steps=best,
        best_goodput=failure_model.compute_goodput(scenario, best * step_s),
        every_steps=scenario.every_steps,
        goodput=0.0 if is_endless else failure_model.compute_goodput(scenario, scenario.interval_s),
    )


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
