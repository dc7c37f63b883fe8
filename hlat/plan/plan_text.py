"""A plan as JSON and as text."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.config.batch_steps import format_growth
from hlat.config.config_files import list_user_config_dirs
from hlat.config.mfu import compute_mfu, compute_peak_flops
from hlat.config.parallelism import ParallelismConfig, PipelineSchedule
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.figures.page_templates import render_text
from hlat.model.activation_spec import KernelBackend
from hlat.model.decoder_spec import compute_flops_per_token, compute_init_std, list_parameter_specs
from hlat.model.parameter_spec import Initialization
from hlat.model.parametrization_spec import (
    compute_attention_scale,
    compute_output_multiplier,
    compute_residual_multiplier,
)
from hlat.optim.optimizer_spec import get_optimizer_spec
from hlat.optim.parametrization import compute_update_settings
from hlat.plan.achieved_speed import get_efficiency
from hlat.plan.forecast import WRITE_BYTES_PER_S, RunForecast
from hlat.plan.hardware_efficiency import (
    get_kernel_backend,
    get_planned_engine,
    load_efficiencies,
)
from hlat.plan.layout_search import LayoutCandidate
from hlat.plan.memory_estimate import MemoryEstimate
from hlat.tracking.text_format import format_count, format_gib, format_short, format_table

MEMORY_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "accumulation": "accumulation",
    "master_weights": "master weights",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "working": "layer workspace",
    "collectives": "collectives' buffers",
    "saving": "checkpoint copy",
    "process": "process",
    "reserve": "reserve",
}
TIME_LABELS = {
    "compute": "matmuls",
    "attention": "attention",
    "elementwise": "other operators",
    "tensor_parallel": "tensor-parallel traffic",
    "expert_parallel": "expert-parallel traffic",
    "sends": "sends between stages",
    "bubble": "pipeline bubble",
    "reduction": "data-parallel collectives",
    "optimizer": "optimizer",
}
_DEVICES = {"trn1": "NeuronCore", "trn": "logical NeuronCore", "cpu": "process"}
"""A device of hardware whose name has a prefix."""
_TEMPLATES = Path(__file__).with_name("templates")
_ROLE_HEADERS = ["role", "parameters", "initial std", "learning rate", "weight decay", "eps"]


@dataclass
class RoleSettings:
    """Settings of the parameters of a role.

    Attributes:
        role: Value of the role.
        num_parameters: Elements of all parameters.
        init_std: Smallest and largest standard deviation of normal initial values; None: constant.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, a factor of the learning rate.
        eps: Added to the root of the second moment; None: the update has none.
    """

    role: str
    num_parameters: int
    init_std: tuple[float, float] | None
    lr: float
    weight_decay: float
    eps: float | None


def list_role_settings(config: Config) -> list[RoleSettings]:
    """Return the settings of each role that the model has, in the order of the forward pass."""
    model, settings = config.model, config.optimizer
    specs, optimizer = list_parameter_specs(model), get_optimizer_spec(settings.name)
    roles = []
    for role in dict.fromkeys(spec.role for spec in specs):
        own = [spec for spec in specs if spec.role is role]
        stds = [compute_init_std(s, model) for s in own if s.init is Initialization.normal]
        update = compute_update_settings(settings, role, model)
        has_eps = "eps" in optimizer.build_hyperparameters(settings, role)
        roles.append(
            RoleSettings(
                role.value,
                sum(spec.numel for spec in own),
                (min(stds), max(stds)) if stds else None,
                settings.lr * update.lr_factor,
                update.weight_decay,
                settings.eps * update.eps_factor if has_eps else None,
            )
        )
    return roles


def summarize_role_settings(config: Config) -> dict[str, Any]:
    """Return the settings of each role, and the multipliers of the model, as JSON."""
    model = config.model
    return {
        "parametrization": model.parametrization.name.value,
        "roles": [asdict(one) for one in list_role_settings(config)],
        "attention_scale": compute_attention_scale(model),
        "residual_multiplier": compute_residual_multiplier(model),
        "output_multiplier": compute_output_multiplier(model),
    }


def format_role_settings(config: Config) -> list[str]:
    """Return a table of the settings of each role, and a line with the multipliers."""
    model = config.model
    rows = [
        [
            one.role,
            format_count(one.num_parameters),
            _format_std(one.init_std),
            format_short(one.lr),
            format_short(one.weight_decay),
            "-" if one.eps is None else format_short(one.eps),
        ]
        for one in list_role_settings(config)
    ]
    multipliers = (
        f"parametrization {model.parametrization.name.value}: attention scale "
        f"{format_short(compute_attention_scale(model))}, residual multiplier "
        f"{format_short(compute_residual_multiplier(model))}, output multiplier "
        f"{format_short(compute_output_multiplier(model))}"
    )
    return [*format_table(_ROLE_HEADERS, rows), "", multipliers]


def _format_std(init_std: tuple[float, float] | None) -> str:
    if init_std is None:
        return "-"
    low, high = map(format_short, init_std)
    return low if low == high else f"{low} to {high}"


def summarize_plan(config: Config, plan: RunForecast) -> dict[str, Any]:
    """Return a plan as JSON; sizes in bytes, times in seconds."""
    throughput = None
    if plan.throughput is not None:
        throughput = asdict(plan.throughput)
        throughput["step"]["total"] = plan.throughput.step.total
    return {
        "model": config.model.name,
        "parameters": plan.num_parameters,
        "active_parameters": plan.num_active_parameters,
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
        "assumed_mfu": plan.assumed_mfu,
        "saves": None if plan.checkpointing is None else asdict(plan.checkpointing),
        "unknown": list(plan.unknown_reasons),
        "settings": summarize_role_settings(config),
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
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    remarks = _build_memory_remarks(config, mesh)
    memory = [
        (MEMORY_LABELS[name], size, remarks[name]) for name, size in asdict(plan.memory).items()
    ]
    return render_text(
        _TEMPLATES / "plan.txt.j2",
        config=config,
        headline=format_headline(config),
        verdict=format_verdict(config, plan),
        mesh=mesh,
        device=get_device_noun(config),
        plan=plan,
        memory=[*memory, ("total", plan.memory.total, "")],
        time_labels=TIME_LABELS,
        write_bytes_per_s=WRITE_BYTES_PER_S,
        peak_flops=compute_peak_flops(
            config.hardware, config.num_processes, config.precision.compute_dtype
        ),
        roles=format_role_settings(config),
        notes=list_notes(config, plan.assumed_mfu),
    )


def format_verdict(config: Config, plan: RunForecast) -> str:
    """Return whether a run fits, the time of its step and the largest parts of it."""
    needed, available = (format_gib(size) for size in (plan.memory.total, plan.device_memory_bytes))
    fits = "fits" if plan.fits else "does not fit"
    sentence = f"{fits}: {needed} of {available} GiB of each {get_device_noun(config)}"
    if plan.throughput is None or plan.assumed_mfu is not None:
        return sentence
    step = plan.throughput.step
    parts = {label: getattr(step, name) / step.total for name, label in TIME_LABELS.items()}
    largest = sorted(parts, key=lambda label: -parts[label])[:2]
    shares = " and ".join(f"{parts[label]:.0%} {label}" for label in largest)
    return f"{sentence}; {step.total:,.3f} s a step, {shares}"


def _build_memory_remarks(config: Config, mesh: ParallelDegrees) -> dict[str, str]:
    """Return dtype and content of each term of MemoryEstimate."""
    precision, zero = config.precision, config.parallelism.zero if mesh.dp_shard > 1 else 0

    def format_dtype(dtype: Dtype | None, stage: int) -> str:
        shard = f", 1/{mesh.dp_shard} on a rank" if zero >= stage else ""
        return "" if dtype is None else dtype.value + shard

    is_gpu = get_kernel_backend(config) is KernelBackend.gpu
    return {
        "weights": precision.param_dtype.value + (", gathered by layer" if zero > 2 else ""),
        "gradients": f"{precision.grad_dtype.value}, not yet accumulated",
        "accumulation": format_dtype(precision.grad_accum_dtype, 2),
        "master_weights": format_dtype(precision.master_weight_dtype, 1),
        "optimizer_state": format_dtype(precision.optimizer_state_dtype, 1),
        "activations": "saved for the backward pass",
        "logits": "of a chunk of tokens",
        "working": "temporary, of one layer",
        "collectives": "",
        "saving": "of an asynchronous save",
        "process": "interpreter and libraries",
        "reserve": "CUDA context, NCCL" if is_gpu else "runtime, programs",
    }


def format_infeasible_plan(config: Config, memory: MemoryEstimate, device_bytes: float) -> str:
    """Return a message with the memory that is missing and the largest term."""
    terms = asdict(memory)
    largest = max(terms, key=lambda name: terms[name])
    return (
        f"infeasible: {_format_layout_keys(config)} needs {format_gib(memory.total)} GiB of each "
        f"{get_device_noun(config)}, {config.hardware.name} has {format_gib(device_bytes)}; the "
        f"largest term is {MEMORY_LABELS[largest]} ({format_gib(terms[largest])} GiB)"
    )


def format_alternatives(
    layouts: Sequence[LayoutCandidate], overrides: Sequence[str] = ()
) -> list[str]:
    """Return a table of the layouts that fit, and the command of the first."""
    if not layouts:
        return ["", "no layout fits"]
    command = format_command(layouts[0], overrides)
    return ["", "the nearest layouts that fit:", "", *format_layouts(layouts), "", command]


def format_layouts(
    layouts: Sequence[LayoutCandidate], configured: LayoutCandidate | None = None
) -> list[str]:
    """Return a table of layouts, with a mark at the configured one."""
    rows = [
        summarize_layout(layout)
        | {"mfu": _compute_mfu(layout), "is_configured": layout is configured}
        for layout in layouts
    ]
    return render_text(_TEMPLATES / "layouts.txt.j2", layouts=rows)


def format_command(
    layout: LayoutCandidate, overrides: Sequence[str] = (), label: str = "to train the first:"
) -> str:
    """Return the command that trains a run of other overrides in a layout, after a label."""
    words = [f"hardware.nodes={layout.config.hardware.nodes}", *layout.overrides]
    return f"{label} {format_train_command(overrides, words)}"


def format_train_command(overrides: Sequence[str], changes: Sequence[str]) -> str:
    """Return the command that trains with overrides, of which `changes` replace some keys."""
    keys = {word.partition("=")[0] for word in changes}
    kept = [word for word in overrides if word.partition("=")[0] not in keys]
    options = [f"--config-dir={directory}" for directory in list_user_config_dirs()]
    return f"hlat train {shlex.join([*options, *kept, *changes])}"


def get_device_noun(config: Config) -> str:
    """Return what a device of the hardware is called."""
    name = config.hardware.name
    prefix = next((prefix for prefix in _DEVICES if name.startswith(prefix)), None)
    if prefix is not None:
        return _DEVICES[prefix]
    return "device" if config.hardware.device is None else "GPU"


def format_headline(config: Config) -> str:
    """Return model, devices and batch of a run."""
    machine, count, noun = config.hardware, config.num_processes, get_device_noun(config)
    nodes = "1 node" if machine.nodes == 1 else f"{format_count(machine.nodes)} nodes"
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    devices = f"1 {noun}" if count == 1 else f"{format_count(count)} {plural}"
    return (
        f"{config.model.name} in {config.precision.name} on {nodes} of {machine.name}, {devices}; "
        f"{format_count(config.batch.global_batch_size)} sequences of "
        f"{format_count(config.batch.sequence_length)} tokens a step{format_growth(config.batch)}"
    )


def _summarize_parallelism(config: Config) -> dict[str, Any]:
    layout = config.parallelism
    mesh = compute_parallel_degrees(layout, config.num_processes)
    return {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "dp": mesh.dp,
        "ep": mesh.ep,
        "pipeline_schedule": layout.pipeline_schedule.value,
        "stages_per_rank": layout.stages_per_rank,
        "micro_batch_size": config.micro_batch_size,
        "micro_batches": config.num_micro_batches,
        "activation_checkpointing": layout.activation_checkpointing.value,
        "sequence_parallel": layout.sequence_parallel,
        "zero": layout.zero,
        "dp_replicate": layout.dp_replicate,
    }


def _format_layout_keys(config: Config) -> str:
    layout = config.parallelism
    ep = f"ep={layout.ep} " if layout.ep > 1 else ""
    replicas = f"dp_replicate={layout.dp_replicate} " if layout.dp_replicate > 1 else ""
    return (
        f"tp={layout.tp} pp={layout.pp} {_format_stages(layout)}{ep}zero={layout.zero} {replicas}"
        f"micro_batch_size={config.micro_batch_size} "
        f"activation_checkpointing={layout.activation_checkpointing.value}"
    )


def _format_stages(layout: ParallelismConfig) -> str:
    """Return the pipeline schedule if it is not the default."""
    if layout.pipeline_schedule is PipelineSchedule.one_f_one_b:
        return ""
    schedule = layout.pipeline_schedule.value
    return f"pipeline_schedule={schedule} stages_per_rank={layout.stages_per_rank} "


def list_notes(config: Config, assumed_mfu: float | None = None) -> list[str]:
    """Return the sources of the constants, and what differs between the plan and the run."""
    notes = []
    hardware = config.hardware
    has_constants = hardware.calibration is not None or hardware.device in load_efficiencies()
    if assumed_mfu is not None:
        notes.append(f"time and price are assumed: mfu={assumed_mfu:g} of the data sheet's peak")
    elif has_constants:
        constants = get_efficiency(config)
        state = "" if constants.is_calibrated else "not calibrated, "
        name = hardware.calibration or hardware.device
        errors = "" if hardware.calibration else "; docs/planning.md has their errors"
        notes.append(f"constants of {name}: {state}{constants.source}{errors}")
        if not constants.eager_passes:
            notes.append("the time of matmuls and attention includes that of other operators")
    if (engine := get_planned_engine(config)) is not config.engine.name:
        notes.append(
            f"planned for engine={engine.value}, the only one on {config.hardware.name}; to train, "
            "set engine=nxd compiler=neuron_2_28"
        )
    return notes


def _compute_tokens_per_second(layout: LayoutCandidate) -> float | None:
    return None if layout.step_s is None else layout.config.batch.tokens_per_step / layout.step_s


def _compute_mfu(layout: LayoutCandidate) -> float | None:
    config, rate = layout.config, _compute_tokens_per_second(layout)
    if rate is None:
        return None
    flops = compute_flops_per_token(config.model, config.batch.sequence_length)
    return compute_mfu(
        rate, flops, config.hardware, config.num_processes, config.precision.compute_dtype
    )
