"""Rules about the layout: what cuts layers, heads, sequences and batches, and over which processes.

As in hlat.config.rules, each is one small function that yields one sentence a violation.
"""

from collections.abc import Callable, Iterable, Iterator

from hlat.config.parallelism import PipelineSchedule
from hlat.config.precision import Rounding
from hlat.config.run import Config


def tensor_parallel(config: Config) -> Iterator[str]:
    """Tensor parallelism cuts or replicates heads evenly, and cuts the SwiGLU product evenly."""
    tp, model = config.parallelism.tp, config.model
    if (
        tp < 1
        or min(model.num_attention_heads, model.num_key_value_heads, model.intermediate_size) < 1
    ):
        return
    if model.num_attention_heads % tp:
        yield not_a_divisor(
            "parallelism.tp", tp, "model.num_attention_heads", model.num_attention_heads
        )
        return
    kv_heads = model.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        heads = _divisors(model.num_attention_heads)
        ways = [n for n in heads if kv_heads % n == 0 or n % kv_heads == 0]
        yield (
            f"parallelism.tp={tp} neither divides model.num_key_value_heads={kv_heads} nor is a "
            f"multiple of it; use {_list(ways)}"
        )
    if model.intermediate_size % tp:
        yield not_a_divisor(
            "parallelism.tp", tp, "model.intermediate_size", model.intermediate_size
        )


def sequence_parallel(config: Config) -> Iterator[str]:
    """Sequence parallelism cuts the sequence over the tensor-parallel ranks."""
    tp, length = config.parallelism.tp, config.batch.sequence_length
    if not config.parallelism.sequence_parallel or tp < 1:
        return
    if tp == 1:
        yield "parallelism.sequence_parallel=true needs parallelism.tp > 1; set it to false"
    elif length % tp:
        yield not_a_divisor("parallelism.tp", tp, "batch.sequence_length", length)


def pipeline_stages(config: Config) -> Iterator[str]:
    """Every stage has a layer."""
    pp, layers = config.parallelism.pp, config.model.num_layers
    if pp > layers > 0:
        yield f"parallelism.pp={pp} exceeds model.num_layers={layers}; use at most {layers}"


def pipeline_schedule(config: Config) -> Iterator[str]:
    """Stages per rank and micro batches fit the schedule, and the recipe what it can sum."""
    layout, precision = config.parallelism, config.precision
    name, stages = layout.pipeline_schedule.value, layout.stages_per_rank
    several = layout.pipeline_schedule is not PipelineSchedule.one_f_one_b
    if min(layout.pp, stages, config.micro_batch_size) < 1:
        return
    if not several and stages > 1:
        yield (
            f"parallelism.stages_per_rank={stages} needs parallelism.pipeline_schedule=interleaved "
            f"or zero_bubble, not {name}; set it to 1"
        )
    if several and layout.pp == 1:
        yield (f"parallelism.pipeline_schedule={name} needs parallelism.pp > 1; use one_f_one_b")
    if (count := layout.pp * stages) > config.model.num_layers > 0 and stages > 1:
        yield (
            f"parallelism.pp={layout.pp} x stages_per_rank={stages} is {count} stages, and "
            f"model.num_layers={config.model.num_layers}; use fewer"
        )
    if several and layout.pp > 1:
        micro = config.num_micro_batches
        if micro % layout.pp:
            yield (
                f"parallelism.pipeline_schedule={name} runs micro batches in rounds of "
                f"parallelism.pp={layout.pp}, and a step has {micro}; change batch.micro_batch_size"
                " or batch.global_batch_size"
            )
    if layout.pipeline_schedule is PipelineSchedule.zero_bubble and (
        precision.accumulation is not precision.gradients
        or precision.rounding is Rounding.stochastic
    ):
        yield (
            "parallelism.pipeline_schedule=zero_bubble adds up gradients in their own dtype, "
            f"rounded to nearest, and precision={precision.name} does not; use interleaved"
        )
    if layout.pp > 1 and config.model.tie_embeddings:
        yield (
            f"model.tie_embeddings=true needs the embedding on the first and the last stage of "
            f"parallelism.pp={layout.pp}; use parallelism.pp=1"
        )


def world(config: Config) -> Iterator[str]:
    """The layout uses exactly the processes there are."""
    tp, pp, dp = config.parallelism.tp, config.parallelism.pp, config.parallelism.dp
    hardware = config.hardware
    have, per_replica = config.num_processes, tp * pp
    if min(have, per_replica) < 1:
        return
    if hardware.processes_per_node is None:
        if hardware.nodes > 1:
            yield (
                f"hardware.nodes={hardware.nodes} needs hardware.processes_per_node, which is "
                "null; say how many processes each node runs"
            )
        return
    there = (
        f"hardware.nodes={hardware.nodes} x processes_per_node={hardware.processes_per_node} "
        f"gives {have}"
    )
    if dp is None and have % per_replica:
        yield (
            f"parallelism.tp={tp} x pp={pp} needs a multiple of {per_replica} processes, {there}; "
            "use more nodes or a smaller layout, such as parallelism=single"
        )
    elif dp is not None and dp * per_replica != have:
        yield (
            f"parallelism.tp={tp} x pp={pp} x dp={dp} is {dp * per_replica} processes, {there}; "
            "leave dp null or match them"
        )


def batch_cuts_evenly(config: Config) -> Iterator[str]:
    """Every data-parallel rank runs the same whole number of micro batches."""
    total, micro = config.batch.global_batch_size, config.micro_batch_size
    layout, processes = config.parallelism, config.num_processes
    replica = layout.tp * layout.pp
    if min(total, micro, processes, replica) < 1:
        return
    dp = layout.dp or max(1, processes // replica)
    if total % (micro * dp):
        ways = _divisors(total // dp) if total % dp == 0 else []
        sizes = f"batch.micro_batch_size {_list(ways)}, or " if ways else ""
        near = max(1, round(total / (micro * dp))) * micro * dp
        yield (
            f"batch.global_batch_size={total} is not a multiple of batch.micro_batch_size={micro} "
            f"x dp={dp}; use {sizes}batch.global_batch_size={near}"
        )


def zero_stage(config: Config) -> Iterator[str]:
    """From stage 2 on torch's FSDP2 casts weights and adds up gradients, in its own way."""
    layout, precision = config.parallelism, config.precision
    key = f"parallelism.zero={layout.zero}"
    if layout.zero > 3:
        yield f"{key} is no stage of ZeRO; use 0, 1, 2 or 3"
    if layout.zero < 2:
        return
    if precision.master_weights is not None and precision.rounding is Rounding.stochastic:
        yield (
            f"{key} casts master weights to nearest, and precision={precision.name} "
            "stochastically; use parallelism.zero=1"
        )
    if layout.pipeline_schedule is PipelineSchedule.zero_bubble:
        yield (
            f"{key} adds up gradients when a layer has gone back, and "
            "parallelism.pipeline_schedule=zero_bubble later; use interleaved, or "
            "parallelism.zero=1"
        )


RULES: tuple[Callable[[Config], Iterable[str]], ...] = (
    tensor_parallel,
    sequence_parallel,
    pipeline_stages,
    pipeline_schedule,
    world,
    batch_cuts_evenly,
    zero_stage,
)
"""What another layout can mend, in the order in which violations are told."""


def not_a_divisor(key: str, value: int, whole_key: str, whole: int) -> str:
    """Say that one value does not divide another, and which would."""
    return f"{key}={value} does not divide {whole_key}={whole}; use {_list(_divisors(whole))}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _list(numbers: Iterable[int]) -> str:
    """Return "1, 2, 4 or 8"; of a long list, the ends."""
    words = [str(n) for n in numbers]
    if len(words) > 12:
        words = [*words[:8], "...", *words[-2:]]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
