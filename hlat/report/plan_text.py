"""A plan as JSON and as text."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hlat.config.run import Config
from hlat.mfu import compute_mfu, compute_peak_flops
from hlat.model.parameter_specs import compute_flops_per_token
from hlat.parallelism.mesh_coordinates import compute_parallel_degrees
from hlat.plan.forecast import CheckpointForecast, RunForecast, ThroughputForecast
from hlat.plan.hardware_efficiency import EFFICIENCIES, get_planned_engine
from hlat.plan.layout_search import LayoutCandidate
from hlat.plan.memory_estimate import MemoryEstimate, get_device_memory_bytes
from hlat.report.text_format import UNKNOWN, format_count, format_duration, format_short

MEMORY_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "accumulation": "accumulation",
    "master_weights": "master weights",
    "moments": "moments",
    "activations": "activations",
    "logits": "logits",
    "working": "layer workspace",
    "collectives": "collectives' buffers",
    "saving": "checkpoint copy",
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
_LABEL_WIDTH = 26
_MAX_ROWS = 15


def summarize_plan(config: Config, plan: RunForecast) -> dict[str, Any]:
    """Return a plan as JSON; sizes in bytes, times in seconds."""
    throughput = None
    if plan.throughput is not None:
        throughput = asdict(plan.throughput)
        throughput["step"]["total"] = plan.throughput.step.total
    return {
        "model": config.model.name,
        "parameters": plan.num_parameters,
        "steps": plan.steps,
        "tokens": plan.tokens,
        "engine": get_planned_engine(config).value,
        "hardware": config.hardware.name,
        "nodes": config.hardware.nodes,
        "layout": _summarize_parallelism(config),
        "fits": plan.fits,
        "memory": {
            **asdict(plan.memory),
            "total": plan.memory.total,
            "device": plan.device_memory_bytes,
        },
        "throughput": throughput,
        "saves": None if plan.checkpointing is None else asdict(plan.checkpointing),
        "unknown": list(plan.unknown_reasons),
    }


def summarize_layout(layout: LayoutCandidate) -> dict[str, Any]:
    """Return a parallel layout of a search as JSON."""
    return {
        "overrides": layout.overrides,
        **_summarize_parallelism(layout.config),
        "nodes": layout.config.hardware.nodes,
        "fits": layout.fits,
        "memory": layout.memory.total,
        "step_seconds": layout.step_s,
        "tokens_per_second": _compute_tokens_per_second(layout),
    }


def format_plan(config: Config, plan: RunForecast) -> list[str]:
    """Return the text of a plan."""
    sections = [
        [_format_headline(config), _format_layout_line(config)],
        _format_memory(plan.memory, plan.device_memory_bytes),
    ]
    if plan.throughput is not None and plan.checkpointing is not None:
        sections += [
            _format_step_time(plan.throughput),
            _format_run(config, plan, plan.throughput),
            _format_saves(plan.checkpointing),
        ]
    else:
        sections.append(list(plan.unknown_reasons))
    sections.append(_format_notes(config))
    return [line for section in sections if section for line in ("", *section)][1:]


def format_infeasible_plan(config: Config, memory: MemoryEstimate, device_bytes: float) -> str:
    """Return a message with the memory that is missing and the largest term."""
    terms = asdict(memory)
    largest = max(terms, key=lambda name: terms[name])
    return (
        f"infeasible: {_format_layout_keys(config)} needs {_format_gib(memory.total)} GiB of each "
        f"device, {config.hardware.name} has {_format_gib(device_bytes)}; {MEMORY_LABELS[largest]} "
        f"({_format_gib(terms[largest])} GiB) are the largest term"
    )


def format_alternatives(layouts: Sequence[LayoutCandidate]) -> list[str]:
    """Return a table of the layouts that fit."""
    if not layouts:
        return ["", "no layout fits"]
    return [
        "",
        "the nearest layouts that fit:",
        "",
        *_format_layouts(layouts),
        "",
        _format_command(layouts[0]),
    ]


def format_ranking(config: Config, layouts: Sequence[LayoutCandidate]) -> list[str]:
    """Return the result of a layout search, best layouts first."""
    fitting = sum(one.fits for one in layouts)
    lines = [
        _format_headline(config),
        f"{format_count(len(layouts))} valid layouts, {format_count(fitting)} fit",
    ]
    if not layouts:
        return lines
    lines += ["", *_format_layouts(layouts[:_MAX_ROWS])]
    if fitting:
        lines += ["", _format_command(layouts[0])]
    else:
        least = min(layouts, key=lambda one: one.memory.total)
        capacity = get_device_memory_bytes(least.config)
        lines += ["", format_infeasible_plan(least.config, least.memory, capacity)]
    notes = _format_notes(config)
    return [*lines, "", *notes] if notes else lines


def _format_layouts(layouts: Sequence[LayoutCandidate]) -> list[str]:
    header = (
        f"{'nodes':>5}{'tp':>4}{'pp':>4}{'dp':>6}{'micro':>6}  {'checkpointing':14}{'zero':>4}"
        f"{'GiB':>7}{'step':>15}{'tokens/s':>12}{'MFU':>7}"
    )
    return [header, *map(_format_layout_row, layouts)]


def _format_command(layout: LayoutCandidate) -> str:
    nodes = f"hardware.nodes={layout.config.hardware.nodes}"
    return " ".join(["the first:", nodes, *layout.overrides])


def _format_headline(config: Config) -> str:
    machine, count = config.hardware, config.num_processes
    nodes = "1 node" if machine.nodes == 1 else f"{format_count(machine.nodes)} nodes"
    devices = "1 device" if count == 1 else f"{format_count(count)} devices"
    return (
        f"{config.model.name} in {config.precision.name} on {nodes} of {machine.name}, {devices}; "
        f"{format_count(config.batch.global_batch_size)} sequences of "
        f"{format_count(config.batch.sequence_length)} tokens a step"
    )


def _summarize_parallelism(config: Config) -> dict[str, Any]:
    layout = config.parallelism
    mesh = compute_parallel_degrees(layout, config.num_processes)
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


def _format_layout_line(config: Config) -> str:
    layout = config.parallelism
    mesh = compute_parallel_degrees(layout, config.num_processes)
    suffix = " with sequence parallelism" if layout.sequence_parallel else ""
    return (
        f"tp {mesh.tp}{suffix}, pp {mesh.pp}, dp {mesh.dp}, zero {layout.zero}, "
        f"{format_count(config.num_micro_batches)} micro batches of {config.micro_batch_size}, "
        f"checkpointing {layout.activation_checkpointing.value}"
    )


def _format_layout_keys(config: Config) -> str:
    layout = config.parallelism
    return (
        f"tp={layout.tp} pp={layout.pp} zero={layout.zero} "
        f"micro_batch_size={config.micro_batch_size} "
        f"activation_checkpointing={layout.activation_checkpointing.value}"
    )


def _format_memory(memory: MemoryEstimate, device_bytes: float) -> list[str]:
    lines = [f"{'memory, GiB':{_LABEL_WIDTH}}{'':>8}   of {_format_gib(device_bytes)}"]
    terms = {MEMORY_LABELS[name]: size for name, size in asdict(memory).items() if size}
    for label, size in {**terms, "total": memory.total}.items():
        share = size / device_bytes
        lines.append(f"{label:{_LABEL_WIDTH}}{_format_gib(size):>8}{share:>10.1%}")
    return lines


def _format_step_time(throughput: ThroughputForecast) -> list[str]:
    step = throughput.step
    lines = ["time of a step, s"]
    for name, label in TIME_LABELS.items():
        seconds = getattr(step, name)
        hidden = ""
        if name == "reduction" and step.hidden:
            hidden = f"   and {format_duration(step.hidden)} behind the backward pass"
        if seconds or hidden:
            lines.append(
                f"{label:{_LABEL_WIDTH}}{seconds:>8.3f}{seconds / step.total:>10.1%}{hidden}"
            )
    return [*lines, f"{'total':{_LABEL_WIDTH}}{step.total:>8.3f}"]


def _format_run(config: Config, plan: RunForecast, throughput: ThroughputForecast) -> list[str]:
    machine = config.hardware
    price = f" at {_format_usd(machine.price_usd_per_hour)} a node and hour ({machine.price_date})"
    cost = _format_usd(throughput.cost_usd, round_to_dollar=True)
    mfu, cores = throughput.mfu, machine.vcpus
    limit = "" if cores is None else f" of {cores}"
    rows = {
        "tokens per second": format_count(throughput.tokens_per_second),
        "MFU": UNKNOWN if mfu is None else f"{mfu:.1%} of {_format_peak_flops(config)}",
        f"days to {format_short(plan.tokens)} tokens": f"{throughput.days:,.2f} without failures",
        "cost": cost + (price if throughput.cost_usd else ""),
        "cost per 4 M tokens": _format_usd(throughput.cost_per_4m_tokens_usd),
        "cores of a node to tokenise": f"{throughput.loader_cores:.2g}{limit}",
    }
    return [f"{label:{_LABEL_WIDTH + 4}}{value}" for label, value in rows.items()]


def _format_saves(saves: CheckpointForecast) -> list[str]:
    rows = {
        "checkpoint": f"{saves.size / 1e9:,.2f} GB, {format_duration(saves.write_s)} to write, "
        f"of which training stops for {format_duration(saves.stall_s)}",
        "best interval": f"{format_count(saves.best_steps)} steps, "
        f"goodput {saves.best_goodput:.1%}",
        "this interval": f"{format_count(saves.every_steps)} steps, goodput {saves.goodput:.1%}",
    }
    return [f"{label:{_LABEL_WIDTH + 4}}{value}" for label, value in rows.items()]


def _format_notes(config: Config) -> list[str]:
    notes = []
    constants = EFFICIENCIES.get(config.hardware.name)
    if constants is not None:
        notes.append(f"constants of {config.hardware.name}: {constants.source}")
    if (engine := get_planned_engine(config)) is not config.engine.name:
        notes.append(
            f"planned for engine={engine.value}, the only one on {config.hardware.name}; to train, "
            "set engine=nxd compiler=neuron_2_28"
        )
    return notes


def _format_layout_row(layout: LayoutCandidate) -> str:
    config, parallelism = layout.config, layout.config.parallelism
    mesh = compute_parallel_degrees(parallelism, config.num_processes)
    step = tokens = mfu = UNKNOWN
    rate = _compute_tokens_per_second(layout)
    if layout.step_s is not None and rate is not None:
        step, tokens = format_duration(layout.step_s), format_count(rate)
        flops = compute_flops_per_token(config.model, config.batch.sequence_length)
        fraction = compute_mfu(
            rate, flops, config.hardware, config.num_processes, config.precision.compute
        )
        mfu = UNKNOWN if fraction is None else f"{fraction:.1%}"
    return (
        f"{config.hardware.nodes:>5}{mesh.tp:>4}{mesh.pp:>4}{mesh.dp:>6}"
        f"{config.micro_batch_size:>6}  {parallelism.activation_checkpointing.value:14}"
        f"{parallelism.zero:>4}{_format_gib(layout.memory.total):>7}{step:>15}{tokens:>12}{mfu:>7}"
    )


def _compute_tokens_per_second(layout: LayoutCandidate) -> float | None:
    return None if layout.step_s is None else layout.config.batch.tokens_per_step / layout.step_s


def _format_peak_flops(config: Config) -> str:
    peak = compute_peak_flops(config.hardware, config.num_processes, config.precision.compute)
    return UNKNOWN if peak is None else f"{peak / 1e12:,.0f} TFLOP/s"


def _format_usd(amount: float | None, round_to_dollar: bool = False) -> str:
    if amount is None:
        return UNKNOWN
    if round_to_dollar:
        return f"${amount:,.0f}"
    return f"${amount:,.3g}" if amount < 1 else f"${amount:,.2f}"


def _format_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f}"
