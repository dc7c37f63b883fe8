"""Validation across config groups: one function per rule that yields a message per violation.

A message names the key, the two conflicting values, and valid values. Bounds of single values are
part of the schema (hlat.config.bounds), and limits of an engine are in
hlat.config.engine_capabilities.
"""

from collections.abc import Callable, Iterable, Iterator

from hlat.config.bounds import find_bounds_violations
from hlat.config.components import find_component_problems, get_spec, list_components
from hlat.config.engine_capabilities import find_unsupported_settings
from hlat.config.parallelism_validation import PARALLELISM_VALIDATORS, format_divisibility_error
from hlat.config.precision import Dtype, Fp32Operator, RoundingMode
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.config.schedule import ScheduleSpec
from hlat.model.decoder_spec import find_conflicts, list_parameter_specs
from hlat.model.families import FAMILY_NAMES
from hlat.model.upcycling_spec import find_upcycling_problems
from hlat.optim.optimizer_spec import EMA, find_average, get_optimizer_spec


def validate_steps(config: Config) -> Iterator[str]:
    """Validate warmup_steps, decay_steps and run.steps against total_steps."""
    schedule, steps = config.schedule, config.run.steps
    total, decay = schedule.total_steps, schedule.decay_steps
    max_decay = total - schedule.warmup_steps
    if schedule.warmup_steps >= total > 0:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} is not below "
            f"schedule.total_steps={total}; lower the first or raise the second"
        )
    if decay is not None and decay > max_decay > 0:
        yield (
            f"schedule.decay_steps={decay} exceeds the {max_decay} steps between "
            f"schedule.warmup_steps={schedule.warmup_steps} and "
            f"schedule.total_steps={total}; use {max_decay} or less"
        )
    if steps is not None and steps > total:
        yield (
            f"run.steps={steps} exceeds schedule.total_steps={total}; "
            f"add schedule.total_steps={steps}, or use run.steps={total} or less"
        )


def validate_shape_fields(config: Config) -> Iterator[str]:
    """Require the fields that the schedule's shape uses, and null for the others."""
    schedule = config.schedule
    if schedule.name not in {one.kind for one in list_components("schedule")}:
        return  # validate_components reports it
    spec: ScheduleSpec = get_spec("schedule", schedule.name)
    examples = {"min_lr_ratio": 0.1, "decay_steps": max(1, schedule.total_steps // 5)}
    for key, example in examples.items():
        value = getattr(schedule, key)
        if key in spec.fields and value is None:
            yield (
                f"schedule.name={schedule.name} reads schedule.{key}, which is null; "
                f"set it, for example to {example}"
            )
        if key not in spec.fields and value is not None:
            yield (
                f"schedule.name={schedule.name} does not read schedule.{key}={value}; "
                f"use schedule.{key}=null"
            )


def validate_stage_lr(config: Config) -> Iterator[str]:
    """Validate end_lr of each stage: it needs lr, and an end within the schedule."""
    tokens_per_step, total_steps = config.batch.tokens_per_step, config.schedule.total_steps
    tokens: int | None = 0
    for i, stage in enumerate(config.phase.timeline):
        tokens = None if tokens is None or stage.tokens is None else tokens + stage.tokens
        if stage.end_lr is None:
            continue
        key = f"phase.timeline.{i}"
        if stage.lr is None:
            yield (
                f"{key}.end_lr={stage.end_lr} needs {key}.lr, which is null; "
                "set it to the learning rate at the start of the stage"
            )
        if tokens is None or tokens_per_step < 1:
            continue
        if (end := -(-tokens // tokens_per_step)) > total_steps:
            yield (
                f"{key}.end_lr={stage.end_lr} is reached at step {end}, and the run ends at "
                f"schedule.total_steps={total_steps}; use schedule.total_steps={end} or shorter "
                "stages"
            )


def validate_recovery(config: Config) -> Iterator[str]:
    """Validate the spike window and the timeouts."""
    recovery = config.recovery
    if not 1 <= recovery.rollback_after < recovery.spike_window:
        yield (
            f"recovery.rollback_after={recovery.rollback_after} is not between 1 and "
            f"recovery.spike_window={recovery.spike_window} - 1; lower the first or raise the "
            "second"
        )
    if recovery.step_timeout_s is not None and recovery.step_timeout_s > recovery.start_timeout_s:
        yield (
            f"recovery.step_timeout_s={recovery.step_timeout_s:g} exceeds "
            f"recovery.start_timeout_s={recovery.start_timeout_s:g}; set it to a few times the "
            "duration of a step, or null"
        )


def validate_components(config: Config) -> Iterator[str]:
    """Require known components, and settings of the model's components that fit together."""
    if problems := [*find_component_problems(config)]:
        yield from problems
        return
    yield from find_conflicts(config.model)
    yield from find_upcycling_problems(config.model)
    if config.model.family not in FAMILY_NAMES:
        yield f"model.family={config.model.family} is unknown; use {', '.join(FAMILY_NAMES)}"


def validate_optimizer(config: Config) -> Iterator[str]:
    """Require settings that the optimizer supports, and one average of the weights."""
    settings = config.optimizer
    if settings.name not in {one.kind for one in list_components("optimizer")}:
        return  # validate_components reports it
    optimizer = get_optimizer_spec(settings.name)
    yield from optimizer.find_conflicts(config)
    average = find_average(settings)
    if settings.ema_decay is not None and average is not EMA:
        yield (
            f"optimizer.ema_decay={settings.ema_decay} is a second average of the weights, as "
            f"optimizer.name={settings.name} averages them; use optimizer.ema_decay=null"
        )


def validate_metrics(config: Config) -> Iterator[str]:
    """Require that metrics of extensions and diagnostics are computed at steps that are logged."""
    tracking, log_every = config.tracking, config.run.log_every
    is_computed = tracking.metrics or tracking.diagnostics
    if is_computed and log_every > 0 and tracking.metrics_every % log_every:
        yield (
            f"tracking.metrics_every={tracking.metrics_every} is not a multiple of "
            f"run.log_every={log_every}; use {log_every} or a multiple of it"
        )


def validate_profiler(config: Config) -> Iterator[str]:
    """Require recorded steps within the run, and ranks of the job."""
    steps, ranks = config.profiler.steps, config.profiler.ranks
    if not steps or config.batch.tokens_per_step < 1 or not config.phase.timeline:
        return
    total, size = compute_total_steps(config), config.num_processes
    if (last := max(steps)) > total > 0:
        yield (
            f"profiler.steps contains {last}, and the run ends at step {total}; use steps from 1 "
            f"to {total}"
        )
    if not ranks:
        yield "profiler.ranks is empty, and profiler.steps is not; use profiler.ranks=[0]"
    elif (rank := max(ranks)) >= size > 0:
        yield (
            f"profiler.ranks contains {rank}, and the run has {size} process"
            f"{'es' * (size > 1)}; use ranks from 0 to {size - 1}"
        )


def validate_lr_by_role(config: Config) -> Iterator[str]:
    """Require learning rates of roles that the model has."""
    rates = {role: lr for role, lr in vars(config.optimizer.lr_by_role).items() if lr is not None}
    if not rates or any(find_component_problems(config)) or config.model.num_attention_heads < 1:
        return
    present = [spec.role.value for spec in list_parameter_specs(config.model)]
    for role, lr in rates.items():
        if role not in present:
            yield (
                f"optimizer.lr_by_role.{role}={lr}: model={config.model.name} has no parameters "
                f"with this role; use null, or one of {', '.join(dict.fromkeys(present))}"
            )


def validate_attention_heads(config: Config) -> Iterator[str]:
    """Require whole heads, and key/value groups of equal size."""
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if min(model.hidden_size, heads, kv_heads) < 1:
        return
    if model.attention.head_dim is None and model.hidden_size % heads:
        yield format_divisibility_error(
            "model.num_attention_heads", heads, "model.hidden_size", model.hidden_size
        )
    if heads % kv_heads:
        yield format_divisibility_error(
            "model.num_key_value_heads", kv_heads, "model.num_attention_heads", heads
        )


def validate_data_sources(config: Config) -> Iterator[str]:
    """Require a source with a positive weight in every stage of the timeline."""
    sources = config.data.sources
    if not sources:
        yield "data.sources is empty; name at least one source with its paths"
        return
    if "mean" in sources:
        yield (
            "data.sources.mean: the evaluation uses this name for the mean over sources; choose "
            "another name"
        )
    weights = {"data.sources.*.weight": {name: s.weight for name, s in sources.items()}}
    for i, stage in enumerate(config.phase.timeline):
        if stage.weights is None:
            continue
        weights[f"phase.timeline.{i}.weights.*"] = stage.weights
        for name in sorted(set(stage.weights) - set(sources)):
            yield (
                f"phase.timeline.{i}.weights.{name}: data={config.data.name} has no source {name}, "
                f"only {', '.join(sources)}; use phase=base or a data group with that source"
            )
    for key, values in weights.items():
        if not sum(values.values()) > 0:
            yield f"{key} are all zero; give at least one source a positive weight"


def validate_timeline(config: Config) -> Iterator[str]:
    """Require a length of at least one step for every stage; only the last may have none."""
    stages, tokens_per_step = config.phase.timeline, config.batch.tokens_per_step
    if not stages:
        yield "phase.timeline is empty; use phase=base"
    for i, stage in enumerate(stages):
        if stage.tokens is None:
            if i + 1 < len(stages):
                yield f"phase.timeline.{i}.tokens is null; only the last stage may be open-ended"
        elif stage.tokens < tokens_per_step:
            yield (
                f"phase.timeline.{i}.tokens={stage.tokens} is less than one step of "
                f"{tokens_per_step} tokens; use that or more"
            )


def validate_directory_names(config: Config) -> Iterator[str]:
    """Require valid directory names; the default name of a run contains the model's."""
    for key, name in (("run.name", config.run.name), ("model.name", config.model.name)):
        if name is not None and (
            not name.isprintable() or name.startswith(".") or set(name) & {"/", "\\"} or not name
        ):
            yield (
                f"{key}={name!r} is not a valid directory name; use letters, digits, '-', '_' and "
                "'.'"
            )


def validate_checkpoints(config: Config) -> Iterator[str]:
    """Validate retention against the checkpoint interval, and the source of the initial state."""
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    if keep is not None and min(every, keep) >= 1 and keep % every:
        nearest = max(1, round(keep / every)) * every
        yield (
            f"checkpoint.keep_every_steps={keep} is not a multiple of "
            f"checkpoint.every_steps={every}, so most of its steps have no checkpoint; use "
            f"{nearest}"
        )
    state, weights = config.checkpoint.start_from, config.model.init_from
    if state is not None and weights is not None:
        yield (
            f"checkpoint.start_from={state} and model.init_from={weights} are both the initial "
            "state of the run; set one of them to null"
        )
    if config.checkpoint.trusted_keys is not None and config.checkpoint.signing_key is None:
        yield (
            f"checkpoint.trusted_keys={config.checkpoint.trusted_keys} with "
            "checkpoint.signing_key=null: the run could not resume from its own checkpoints; set "
            "checkpoint.signing_key to a private key file"
        )


def validate_precision(config: Config) -> Iterator[str]:
    """Require compatible dtypes in the precision recipe."""
    precision = config.precision
    param, master = precision.param_dtype, precision.master_weight_dtype
    for key in ("compute_dtype", "grad_dtype"):
        if (dtype := getattr(precision, key)) is not param:
            yield _format_dtype_mismatch(key, dtype, "param_dtype", param)
    if master is not None and master is param:
        yield (
            f"precision.master_weight_dtype={master.value} repeats precision.param_dtype; "
            "use precision.master_weight_dtype=null"
        )
    elif master is Dtype.bf16:
        yield (
            "precision.master_weight_dtype=bf16 is narrower than precision.param_dtype=fp32; "
            "use precision.master_weight_dtype=null"
        )
    key, updated = ("param_dtype", param) if master is None else ("master_weight_dtype", master)
    if (state := precision.optimizer_state_dtype) is not updated:
        yield _format_dtype_mismatch("optimizer_state_dtype", state, key, updated)
    for key in ("grad_accum_dtype", "reduce_dtype"):
        if (dtype := getattr(precision, key)) is Dtype.bf16 and precision.grad_dtype is Dtype.fp32:
            yield _format_dtype_mismatch(key, dtype, "grad_dtype", Dtype.fp32)
    if precision.rounding is RoundingMode.stochastic and param is Dtype.fp32:
        yield (
            "precision.rounding=stochastic applies to bf16 weights, and "
            "precision.param_dtype=fp32; use precision.rounding=nearest"
        )
    fused = {Fp32Operator.logits, Fp32Operator.loss} & set(precision.fp32_operators)
    if len(fused) == 1:
        yield (
            f"precision.fp32_operators contains only {fused.pop().value} of logits and loss, which "
            "are one fused computation; name both or neither"
        )


VALIDATORS: tuple[Callable[[Config], Iterable[str]], ...] = (
    find_bounds_violations,
    validate_steps,
    validate_shape_fields,
    validate_stage_lr,
    validate_recovery,
    validate_components,
    validate_optimizer,
    validate_metrics,
    validate_profiler,
    validate_attention_heads,
    validate_lr_by_role,
    *PARALLELISM_VALIDATORS,
    validate_data_sources,
    validate_timeline,
    validate_directory_names,
    validate_precision,
    validate_checkpoints,
    find_unsupported_settings,
)


def _format_dtype_mismatch(key: str, dtype: Dtype, other_key: str, other: Dtype) -> str:
    return (
        f"precision.{key}={dtype.value} differs from precision.{other_key}={other.value}; "
        f"use precision.{key}={other.value}"
    )
