"""What a plan says, as JSON and as tables."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hlat.config.run import Config
from hlat.hardware import mfu, peak_flops
from hlat.model.canonical import flops_per_token
from hlat.parallelism.mesh import degrees
from hlat.planning.efficiency import EFFICIENCIES, planned_engine
from hlat.planning.forecast import Forecast, Saves, Throughput
from hlat.planning.memory import Memory, device_memory
from hlat.planning.search import Layout
from hlat.reporting.wording import UNKNOWN, duration, short, whole

MEMORY_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "accumulation": "accumulation",
    "master_weights": "master weights",
    "moments": "moments",
    "activations": "activations",
    "logits": "logits",
    "working": "work of a layer",
    "collectives": "collectives' buffers",
    "saving": "copy that is saved",
    "reserve": "reserve",
}
TIME_LABELS = {
    "compute": "compute",
    "tensor_parallel": "tensor-parallel traffic",
    "sends": "sends between stages",
    "bubble": "pipeline bubble",
    "reduction": "data-parallel reduction",
    "optimizer": "optimizer",
}
_WIDTH = 26
_MOST_ROWS = 15


def summarise(config: Config, plan: Forecast) -> dict[str, Any]:
    """Return all numbers of a plan, as JSON has them; bytes and seconds unless a name says else."""
    throughput = None
    if plan.throughput is not None:
        throughput = asdict(plan.throughput)
        throughput["step"]["total"] = plan.throughput.step.total
    return {
        "model": config.model.name,
        "parameters": plan.num_parameters,
        "steps": plan.steps,
        "tokens": plan.tokens,
        "engine": planned_engine(config).value,
        "hardware": config.hardware.name,
        "nodes": config.hardware.nodes,
        "layout": _layout_numbers(config),
        "fits": plan.fits,
        "memory": {**asdict(plan.memory), "total": plan.memory.total, "device": plan.device_bytes},
        "throughput": throughput,
        "saves": None if plan.saves is None else asdict(plan.saves),
        "unknown": list(plan.unknown),
    }


def summarise_layout(found: Layout) -> dict[str, Any]:
    """Return what a search says of a layout, as JSON has it."""
    seconds = found.step_s
    return {
        "overrides": found.overrides,
        **_layout_numbers(found.config),
        "nodes": found.config.hardware.nodes,
        "fits": found.fits,
        "memory": found.memory.total,
        "step_seconds": seconds,
        "tokens_per_second": _tokens_per_second(found),
    }


def table(config: Config, plan: Forecast) -> list[str]:
    """Return the lines that tell a plan."""
    lines = [_headline(config), _layout_line(config), "", *_memory(plan.memory, plan.device_bytes)]
    if plan.throughput is not None and plan.saves is not None:
        lines += ["", *_time(plan.throughput), "", *_run(config, plan, plan.throughput)]
        lines += ["", *_saves(plan.saves)]
    else:
        lines += ["", *plan.unknown]
    return [*lines, *_notes(config)]


def misfit(config: Config, memory: Memory, have: float) -> str:
    """Return the sentence of a plan that does not fit: the term that breaks."""
    terms = asdict(memory)
    largest = max(terms, key=lambda name: terms[name])
    return (
        f"infeasible: {_short_layout(config)} needs {_gib(memory.total)} GiB of each device, "
        f"{config.hardware.name} has {_gib(have)}; {MEMORY_LABELS[largest]} "
        f"({_gib(terms[largest])} GiB) are the largest term"
    )


def alternatives(found: Sequence[Layout]) -> list[str]:
    """Return the lines that tell the nearest layouts that fit."""
    if not found:
        return ["", "no layout fits"]
    return ["", "the nearest layouts that fit:", "", *_layouts(found), "", _command(found[0])]


def ranking(config: Config, found: Sequence[Layout]) -> list[str]:
    """Return the lines that tell a search, the best layouts first."""
    fitting = sum(one.fits for one in found)
    lines = [_headline(config), f"{whole(len(found))} valid layouts, {whole(fitting)} fit"]
    if not found:
        return lines
    lines += ["", *_layouts(found[:_MOST_ROWS])]
    if fitting:
        lines += ["", _command(found[0])]
    else:
        least = min(found, key=lambda one: one.memory.total)
        have = device_memory(least.config)
        lines += ["", misfit(least.config, least.memory, have)]
    return [*lines, *_notes(config)]


def _layouts(found: Sequence[Layout]) -> list[str]:
    """A table of layouts, in their order."""
    header = (
        f"{'nodes':>5}{'tp':>4}{'pp':>4}{'dp':>6}{'micro':>6}  {'checkpointing':14}{'zero':>4}"
        f"{'GiB':>7}{'step':>15}{'tokens/s':>12}{'MFU':>7}"
    )
    return [header, *map(_layout_row, found)]


def _command(found: Layout) -> str:
    nodes = f"hardware.nodes={found.config.hardware.nodes}"
    return " ".join(["the first:", nodes, *found.overrides])


def _headline(config: Config) -> str:
    machine, count = config.hardware, config.num_processes
    nodes = "1 node" if machine.nodes == 1 else f"{whole(machine.nodes)} nodes"
    devices = "1 device" if count == 1 else f"{whole(count)} devices"
    return (
        f"{config.model.name} in {config.precision.name} on {nodes} of {machine.name}, {devices}; "
        f"{whole(config.batch.global_batch_size)} sequences of "
        f"{whole(config.batch.sequence_length)} tokens a step"
    )


def _layout_numbers(config: Config) -> dict[str, Any]:
    mesh, layout = degrees(config.parallelism, config.num_processes), config.parallelism
    return {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "dp": mesh.dp,
        "micro_batch_size": config.micro_batch_size,
        "micro_batches": config.num_micro_batches,
        "activation_checkpointing": layout.activation_checkpointing.value,
        "sequence_parallel": layout.sequence_parallel,
        "zero": layout.zero,
    }


def _layout_line(config: Config) -> str:
    mesh, layout = degrees(config.parallelism, config.num_processes), config.parallelism
    cut = " with sequence parallelism" if layout.sequence_parallel else ""
    return (
        f"tp {mesh.tp}{cut}, pp {mesh.pp}, dp {mesh.dp}, zero {layout.zero}, "
        f"{whole(config.num_micro_batches)} micro batches of {config.micro_batch_size}, "
        f"checkpointing {layout.activation_checkpointing.value}"
    )


def _short_layout(config: Config) -> str:
    layout = config.parallelism
    return (
        f"tp={layout.tp} pp={layout.pp} zero={layout.zero} "
        f"micro_batch_size={config.micro_batch_size} "
        f"activation_checkpointing={layout.activation_checkpointing.value}"
    )


def _memory(memory: Memory, have: float) -> list[str]:
    lines = [f"{'memory, GiB':{_WIDTH}}{'':>8}   of {_gib(have)}"]
    for name, size in asdict(memory).items():
        if size:
            lines.append(f"{MEMORY_LABELS[name]:{_WIDTH}}{_gib(size):>8}{size / have:>10.1%}")
    total = memory.total
    return [*lines, f"{'together':{_WIDTH}}{_gib(total):>8}{total / have:>10.1%}"]


def _time(throughput: Throughput) -> list[str]:
    step = throughput.step
    lines = ["time of a step, s"]
    for name, label in TIME_LABELS.items():
        seconds = getattr(step, name)
        hidden = ""
        if name == "reduction" and step.hidden:
            hidden = f"   and {duration(step.hidden)} behind the backward pass"
        if seconds or hidden:
            lines.append(f"{label:{_WIDTH}}{seconds:>8.3f}{seconds / step.total:>10.1%}{hidden}")
    return [*lines, f"{'together':{_WIDTH}}{step.total:>8.3f}"]


def _run(config: Config, plan: Forecast, throughput: Throughput) -> list[str]:
    machine = config.hardware
    dated = f" at {_usd(machine.price_usd_per_hour)} a node and hour ({machine.price_date})"
    mfu, cores = throughput.mfu, machine.vcpus
    has = "" if cores is None else f" of {cores}"
    rows = {
        "tokens per second": whole(throughput.tokens_per_second),
        "MFU": UNKNOWN if mfu is None else f"{mfu:.1%} of {_peak(config)}",
        f"days to {short(plan.tokens)} tokens": f"{throughput.days:,.2f} without failures",
        "cost": _usd(throughput.cost_usd, whole=True) + (dated if throughput.cost_usd else ""),
        "cost per 4 M tokens": _usd(throughput.cost_per_4m_tokens_usd),
        "cores of a node to tokenise": f"{throughput.loader_cores:.2g}{has}",
    }
    return [f"{label:{_WIDTH + 4}}{value}" for label, value in rows.items()]


def _saves(saves: Saves) -> list[str]:
    rows = {
        "checkpoint": f"{saves.size / 1e9:,.2f} GB, {duration(saves.write_s)} to write, of which "
        f"training stops for {duration(saves.stall_s)}",
        "best interval": f"{whole(saves.best_steps)} steps, goodput {saves.best_goodput:.1%}",
        "this interval": f"{whole(saves.every_steps)} steps, goodput {saves.goodput:.1%}",
    }
    return [f"{label:{_WIDTH + 4}}{value}" for label, value in rows.items()]


def _notes(config: Config) -> list[str]:
    notes = []
    constants = EFFICIENCIES.get(config.hardware.name)
    if constants is not None:
        notes.append(f"constants of {config.hardware.name}: {constants.source}")
    if (engine := planned_engine(config)) is not config.engine.name:
        notes.append(
            f"planned for engine={engine.value}, the only one on {config.hardware.name}; to train, "
            "set engine=nxd compiler=neuron_2_28"
        )
    return ["", *notes] if notes else []


def _layout_row(found: Layout) -> str:
    config = found.config
    mesh, layout = degrees(config.parallelism, config.num_processes), config.parallelism
    rate, peak = _tokens_per_second(found), _peak_of(found)
    step = UNKNOWN if found.step_s is None else duration(found.step_s)
    tokens = UNKNOWN if rate is None else whole(rate)
    mfu = UNKNOWN if peak is None else f"{peak:.1%}"
    return (
        f"{config.hardware.nodes:>5}{mesh.tp:>4}{mesh.pp:>4}{mesh.dp:>6}"
        f"{config.micro_batch_size:>6}  {layout.activation_checkpointing.value:14}"
        f"{layout.zero:>4}{_gib(found.memory.total):>7}{step:>15}{tokens:>12}{mfu:>7}"
    )


def _tokens_per_second(found: Layout) -> float | None:
    return None if found.step_s is None else found.config.batch.tokens_per_step / found.step_s


def _peak_of(found: Layout) -> float | None:
    config, rate = found.config, _tokens_per_second(found)
    if rate is None:
        return None
    flops = flops_per_token(config.model, config.batch.sequence_length)
    return mfu(rate, flops, config.hardware, config.num_processes, config.precision.compute)


def _peak(config: Config) -> str:
    peak = peak_flops(config.hardware, config.num_processes, config.precision.compute)
    return UNKNOWN if peak is None else f"{peak / 1e12:,.0f} TFLOP/s"


def _usd(amount: float | None, whole: bool = False) -> str:
    if amount is None:
        return UNKNOWN
    return f"${amount:,.0f}" if whole else f"${amount:,.3g}" if amount < 1 else f"${amount:,.2f}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
