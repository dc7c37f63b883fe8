"""Rules across groups: one small function a rule, each yielding one sentence a violation.

A sentence names the key, the two values that disagree, and values that would work.
"""

from collections.abc import Callable, Iterable, Iterator

from hlat.config import nxd_rules, parallelism_rules, recovery_rules, schedule_rules
from hlat.config.engine import Backend
from hlat.config.parallelism_rules import not_a_divisor
from hlat.config.precision import Dtype, Operator, Rounding
from hlat.config.run import Config


def at_least(config: Config) -> Iterator[str]:
    """Counts and sizes have a least value."""
    least = {
        "model.num_layers": 1,
        "model.hidden_size": 1,
        "model.intermediate_size": 1,
        "model.num_attention_heads": 1,
        "model.num_key_value_heads": 1,
        "model.vocab_size": 1,
        "batch.global_batch_size": 1,
        "batch.micro_batch_size": 1,
        "batch.sequence_length": 2,
        "parallelism.tp": 1,
        "parallelism.pp": 1,
        "parallelism.dp": 1,
        "parallelism.zero": 0,
        "parallelism.stages_per_rank": 1,
        "data.heldout_documents": 1,
        "data.workers": 0,
        "data.prefetch": 0,
        "data.preview": 0,
        "optimizer.eps": 0,
        "optimizer.weight_decay": 0,
        "optimizer.grad_clip": 0,
        "schedule.warmup_steps": 0,
        "schedule.total_steps": 1,
        "schedule.decay_steps": 1,
        "hardware.nodes": 1,
        "hardware.processes_per_node": 1,
        "checkpoint.every_steps": 1,
        "checkpoint.keep_last": 1,
        "checkpoint.milestone_tokens": 1,
        "recovery.spike_window": 2,
        "recovery.max_restarts": 0,
        "recovery.max_same_failures": 1,
        "recovery.check_replicas_every_steps": 1,
        "checkpoint.keep_every_steps": 1,
        "evaluation.every_steps": 1,
        "evaluation.sequences_per_source": 1,
        "run.seed": 0,
        "run.steps": 1,
        "run.log_every": 1,
    }
    for key, smallest in least.items():
        group, _, name = key.partition(".")
        value = getattr(getattr(config, group), name)
        if value is not None and not value >= smallest:
            yield f"{key}={value} is too small; use {smallest} or more"


def fractions(config: Config) -> Iterator[str]:
    """Rates and ratios lie in their ranges."""
    optimizer, schedule = config.optimizer, config.schedule
    positive = {
        "optimizer.lr": optimizer.lr,
        "model.rope_theta": config.model.rope_theta,
        "model.rms_norm_eps": config.model.rms_norm_eps,
        "model.init_std": config.model.init_std,
        "data.warn_epochs": config.data.warn_epochs,
        "recovery.spike_margin": config.recovery.spike_margin,
        "recovery.max_clock_skew_s": config.recovery.max_clock_skew_s,
        "hardware.memory_gib": config.hardware.memory_gib,
        "hardware.price_usd_per_hour": config.hardware.price_usd_per_hour,
        **{f"hardware.peak_tflops.{k}": v for k, v in config.hardware.peak_tflops.items()},
    }
    for key, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            yield f"{key}={value} is not a positive number"
    for name in ("beta1", "beta2"):
        if not 0 <= (beta := getattr(optimizer, name)) < 1:
            yield f"optimizer.{name}={beta} is outside [0, 1)"
    shares = {
        "schedule.min_lr_ratio": schedule.min_lr_ratio,
        "recovery.min_speed_share": config.recovery.min_speed_share,
    }
    for key, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            yield f"{key}={share} is outside [0, 1]"


def attention_heads(config: Config) -> Iterator[str]:
    """Heads cut the hidden size evenly into even sizes; key/value heads serve equal groups."""
    model = config.model
    hidden, heads, kv_heads = (
        model.hidden_size,
        model.num_attention_heads,
        model.num_key_value_heads,
    )
    if min(hidden, heads, kv_heads) < 1:
        return
    if hidden % heads:
        yield not_a_divisor("model.num_attention_heads", heads, "model.hidden_size", hidden)
    elif model.head_dim % 2:
        yield (
            f"model.hidden_size={hidden} over model.num_attention_heads={heads} gives an odd head "
            f"size {model.head_dim}; rotary embedding needs an even one"
        )
    if heads % kv_heads:
        yield not_a_divisor(
            "model.num_key_value_heads", kv_heads, "model.num_attention_heads", heads
        )


def sources_are_mixed(config: Config) -> Iterator[str]:
    """Weights are shares: none negative, and some text in every stage."""
    sources = config.data.sources
    if not sources:
        yield "data.sources is empty; name at least one source with its paths"
        return
    if "mean" in sources:
        yield "data.sources.mean: evaluation calls the mean over sources so; choose another name"
    yield from _weights(
        "data.sources.{}.weight", {name: source.weight for name, source in sources.items()}
    )
    for i, stage in enumerate(config.phase.timeline):
        weights = stage.weights or {}
        for name in sorted(set(weights) - set(sources)):
            yield (
                f"phase.timeline.{i}.weights.{name}: data={config.data.name} has no source {name}, "
                f"only {', '.join(sources)}; use phase=base or a data group with that source"
            )
        if stage.weights is not None:
            yield from _weights(f"phase.timeline.{i}.weights.{{}}", weights)


def timeline(config: Config) -> Iterator[str]:
    """Stages have lengths; only the last may be open."""
    stages, least = config.phase.timeline, config.batch.tokens_per_step
    if not stages:
        yield "phase.timeline is empty; use phase=base"
    for i, stage in enumerate(stages):
        if stage.tokens is None and i + 1 < len(stages):
            yield f"phase.timeline.{i}.tokens is null; only the last stage may be open"
        if stage.tokens is not None and stage.tokens < least:
            yield (
                f"phase.timeline.{i}.tokens={stage.tokens} is less than one step of "
                f"{least} tokens; use that or more"
            )


def folder_names(config: Config) -> Iterator[str]:
    """A run's name, which may come from the model's, is the name of its folder."""
    for key, name in (("run.name", config.run.name), ("model.name", config.model.name)):
        if name is not None and not _names_a_folder(name):
            yield f"{key}={name!r} cannot name a folder; use letters, digits, '-', '_' and '.'"


def kept_are_saved(config: Config) -> Iterator[str]:
    """Only a step that is saved can be kept."""
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    if kept is not None and min(every, kept) >= 1 and kept % every:
        near = max(1, round(kept / every)) * every
        yield (
            f"checkpoint.keep_every_steps={kept} is not a multiple of "
            f"checkpoint.every_steps={every}, so most of its steps are never saved; use {near}"
        )


def one_origin(config: Config) -> Iterator[str]:
    """A run begins from a whole state, from weights alone, or from neither."""
    state, weights = config.checkpoint.start_from, config.model.init_from
    if state is not None and weights is not None:
        yield (
            f"checkpoint.start_from={state} and model.init_from={weights} both say what the run "
            "begins from; set one of them to null"
        )


def probes(config: Config) -> Iterator[str]:
    """Questions are read text by text, for which one rank needs whole layers."""
    layout, names = config.parallelism, ", ".join(config.evaluation.probes)
    if not names:
        return
    key = f"evaluation.probes ({names})"
    if config.engine.name is Backend.nxd:
        yield f"{key} cannot be asked by engine=nxd; ask checkpoints, with python -m hlat.evaluate"
    if layout.zero > 1:
        yield f"{key} cannot be asked under parallelism.zero={layout.zero}; use zero=1 or 0"


def inductor(config: Config) -> Iterator[str]:
    """TorchInductor compiles what PyTorch alone runs, and not beside another compiler."""
    if not config.compiler.inductor:
        return
    if config.engine.name is not Backend.native:
        engine = config.engine.name.value
        yield f"compiler.inductor=true needs engine.name=native, not {engine}; set it to false"
    if config.compiler.neuron_sdk is not None:
        yield (
            "compiler.inductor=true and compiler.neuron_sdk="
            f"{config.compiler.neuron_sdk} name two compilers; set one of them to false or null"
        )


def recipe(config: Config) -> Iterator[str]:
    """A recipe's dtypes are ones that go together."""
    precision = config.precision
    weights, master = precision.weights, precision.master_weights
    for key in ("compute", "gradients"):
        if (dtype := getattr(precision, key)) is not weights:
            yield _differs(f"precision.{key}", dtype, "precision.weights", weights)
    if master is not None and master is weights:
        yield (
            f"precision.master_weights={master.value} repeats precision.weights; "
            "use precision.master_weights=null"
        )
    elif master is Dtype.bf16:
        yield (
            "precision.master_weights=bf16 is narrower than precision.weights=fp32; "
            "use precision.master_weights=null"
        )
    key, updated = ("weights", weights) if master is None else ("master_weights", master)
    if (state := precision.optimizer_state) is not updated:
        yield _differs("precision.optimizer_state", state, f"precision.{key}", updated)
    for key in ("accumulation", "reduction"):
        if (dtype := getattr(precision, key)) is Dtype.bf16 and precision.gradients is Dtype.fp32:
            yield _differs(f"precision.{key}", dtype, "precision.gradients", Dtype.fp32)
    if precision.rounding is Rounding.stochastic and weights is Dtype.fp32:
        yield (
            "precision.rounding=stochastic rounds what is stored in bf16, and "
            "precision.weights=fp32; use precision.rounding=nearest"
        )
    together = {Operator.logits, Operator.loss} & set(precision.fp32_operators)
    if len(together) == 1:
        yield (
            f"precision.fp32_operators has {together.pop().value} alone; logits and loss are one "
            "computation: name both or neither"
        )


RULES: tuple[Callable[[Config], Iterable[str]], ...] = (
    at_least,
    fractions,
    *schedule_rules.RULES,
    *recovery_rules.RULES,
    attention_heads,
    *parallelism_rules.RULES,
    sources_are_mixed,
    timeline,
    folder_names,
    inductor,
    recipe,
    kept_are_saved,
    one_origin,
    probes,
    nxd_rules.nxd,
)
"""Every rule, in the order in which violations are told."""


def _names_a_folder(name: str) -> bool:
    plain = all(c.isprintable() and c not in "/\\" for c in name)
    return bool(name) and plain and not name.startswith(".")


def _differs(key: str, dtype: Dtype, other_key: str, other: Dtype) -> str:
    return f"{key}={dtype.value} differs from {other_key}={other.value}; use {key}={other.value}"


def _weights(key: str, weights: dict[str, float]) -> Iterator[str]:
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            yield f"{key.format(name)}={weight} is not a share; use 0 or more"
    if not sum(weights.values()) > 0:
        yield f"{key.format('*')} are all zero; give at least one source a positive weight"
