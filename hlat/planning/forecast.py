"""All that a plan says of a run: does it fit, how fast is it, what does it cost, how often to save.

Numbers that need something unknown, a peak, a price or constants, are None with a reason; the rest
stands.
"""

from dataclasses import dataclass

from hlat import hardware
from hlat.config.data import Encoder
from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.model.canonical import flops_per_token, num_parameters
from hlat.planning import failures, step_time
from hlat.planning.disk import checkpoint_bytes
from hlat.planning.failures import Scenario
from hlat.planning.memory import Memory, device_memory, estimate
from hlat.planning.scenarios import compose
from hlat.planning.step_time import StepTime
from hlat.state import total_steps

TOKENS_PER_CPU_SECOND = {Encoder.reference: 0.59e6, Encoder.fast: 6.5e6}
"""Of a core that tokenises, measured end to end (docs/data.md)."""
WRITE_BYTES_PER_S = 1e9
"""Of each node to shared storage, assumed; all nodes write at once."""
COPY_BYTES_PER_S = 10e9
"""Of each node from its devices to its memory, assumed: for which a save beside training stops."""
_LONGEST_INTERVAL = 100
"""In mean times between failures: one attempt in e^100 would end."""


@dataclass(frozen=True)
class Throughput:
    """What follows from the time of a step; None where peak or price is not known.

    Attributes:
        step: Its parts.
        tokens_per_second: Of the whole run.
        mfu: Share of the peak.
        days: Until the run's last step, if nothing fails.
        cost_usd: Of these days.
        cost_per_4m_tokens_usd: As in the HLAT paper, section V-F.
        loader_cores: Of a node, that tokenise.
    """

    step: StepTime
    tokens_per_second: float
    mfu: float | None
    days: float
    cost_usd: float | None
    cost_per_4m_tokens_usd: float | None
    loader_cores: float


@dataclass(frozen=True)
class Saves:
    """What checkpoints cost, at the failure rate that docs/failures.md fits.

    Attributes:
        size: Bytes of one.
        write_s: Seconds until it is on shared storage.
        stall_s: Seconds for which it stops training.
        best_steps: The interval with the highest goodput.
        best_goodput: That goodput.
        every_steps: The run's own interval.
        goodput: Its goodput.
    """

    size: int
    write_s: float
    stall_s: float
    best_steps: int
    best_goodput: float
    every_steps: int
    goodput: float


@dataclass(frozen=True)
class Forecast:
    """A plan.

    Attributes:
        num_parameters: Of the whole model.
        steps: Of the run.
        tokens: That they train on.
        memory: Bytes of the fullest device, by term.
        device_bytes: That it has.
        throughput: None where no time can be told.
        saves: None there as well.
        unknown: Why no time can be told; empty if it can.
    """

    num_parameters: int
    steps: int
    tokens: int
    memory: Memory
    device_bytes: float
    throughput: Throughput | None
    saves: Saves | None
    unknown: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.memory.total <= self.device_bytes


def forecast(config: Config) -> Forecast:
    """Return the plan of a run that obeys every rule."""
    throughput = saves = None
    unknown: tuple[str, ...] = ()
    try:
        throughput = _throughput(config, step_time.predict(config))
        saves = _saves(config, throughput.step.total)
    except ConfigError as error:
        unknown = tuple(error.problems)
    steps = total_steps(config)
    return Forecast(
        num_parameters=num_parameters(config.model),
        steps=steps,
        tokens=steps * config.batch.tokens_per_step,
        memory=estimate(config),
        device_bytes=device_memory(config),
        throughput=throughput,
        saves=saves,
        unknown=unknown,
    )


def _throughput(config: Config, step: StepTime) -> Throughput:
    machine = config.hardware
    rate = config.batch.tokens_per_step / step.total
    days = total_steps(config) * step.total / 86400
    price = machine.price_usd_per_hour
    flops = flops_per_token(config.model, config.batch.sequence_length)
    return Throughput(
        step=step,
        tokens_per_second=rate,
        mfu=hardware.mfu(rate, flops, machine, config.num_processes, config.precision.compute),
        days=days,
        cost_usd=None if price is None else days * 24 * machine.nodes * price,
        cost_per_4m_tokens_usd=hardware.cost_per_4m_tokens(machine, rate),
        loader_cores=rate / machine.nodes / TOKENS_PER_CPU_SECOND[config.data.encoder],
    )


def _saves(config: Config, step_s: float) -> Saves:
    size = checkpoint_bytes(config)
    of_node = size / config.hardware.nodes
    write_s, asynchronous = of_node / WRITE_BYTES_PER_S, config.checkpoint.asynchronous
    stall_s = of_node / COPY_BYTES_PER_S if asynchronous else write_s
    every = config.checkpoint.every_steps
    scenario = _scenario(config, step_s, stall_s, write_s if asynchronous else 0.0, write_s)
    best = failures.best_steps(scenario)
    return Saves(
        size=size,
        write_s=write_s,
        stall_s=stall_s,
        best_steps=best,
        best_goodput=failures.goodput(scenario, best * step_s),
        every_steps=every,
        goodput=_goodput(scenario),
    )


def _goodput(scenario: Scenario) -> float:
    """The goodput of the scenario's own interval; 0 where no run would get through one."""
    if scenario.interval_s > _LONGEST_INTERVAL * scenario.mtbf_s:
        return 0.0
    return failures.goodput(scenario, scenario.interval_s)


def _scenario(
    config: Config, step_s: float, stall_s: float, behind_s: float, load_s: float
) -> Scenario:
    """The run with automatic recovery, with its own steps and saves."""
    given: dict[str, float] = {
        "nodes": config.hardware.nodes,
        "step_s": step_s,
        "save_stall_s": stall_s,
        "save_write_s": behind_s,
        "load_s": load_s,
        "every_steps": config.checkpoint.every_steps,
        "steps": total_steps(config),
    }
    return compose("automatic", given)[0]
