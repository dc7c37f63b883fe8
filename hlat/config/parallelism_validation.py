"""Validation of the layout: sharding of heads, layers, sequences and batches over processes."""

from collections.abc import Callable, Iterable, Iterator

from hlat.config.engine import EngineBackend
from hlat.config.parallelism import PipelineSchedule
from hlat.config.run import Config
from hlat.model.mlp_spec import get_mlp_spec


def validate_tensor_parallel(config: Config) -> Iterator[str]:
    """Require that tp shards or replicates heads evenly, and shards intermediate_size evenly."""
    tp, model = config.parallelism.tp, config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if min(tp, heads, kv_heads, model.intermediate_size) < 1:
        return
    if heads % tp:
        yield format_divisibility_error("parallelism.tp", tp, "model.num_attention_heads", heads)
        return
    if kv_heads % tp and tp % kv_heads:
        valid = [n for n in _list_divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
        yield (
            f"parallelism.tp={tp} is neither a divisor nor a multiple of "
            f"model.num_key_value_heads={kv_heads}; use {_format_choices(valid)}"
        )
    for key, size in get_mlp_spec(model).list_sharded_sizes(model).items():
        if size % tp:
            yield format_divisibility_error("parallelism.tp", tp, key, size)


def validate_sequence_parallel(config: Config) -> Iterator[str]:
    """Require that sequence parallelism shards the sequence evenly over tp > 1 ranks."""
    tp, length = config.parallelism.tp, config.batch.sequence_length
    if not config.parallelism.sequence_parallel or tp < 1:
        return
    if tp == 1:
        yield "parallelism.sequence_parallel=true needs parallelism.tp > 1; set it to false"
    elif length % tp:
        yield format_divisibility_error("parallelism.tp", tp, "batch.sequence_length", length)


def validate_pipeline(config: Config) -> Iterator[str]:
    """Validate the stages and micro batches of the pipeline schedule."""
    layout, layers = config.parallelism, config.model.num_layers
    pp, stages, schedule = layout.pp, layout.stages_per_rank, layout.pipeline_schedule
    if pp > layers > 0:
        yield f"parallelism.pp={pp} exceeds model.num_layers={layers}; use at most {layers}"
    if min(pp, stages, config.micro_batch_size) < 1:
        return
    if (num_stages := pp * stages) > layers > 0 and stages > 1:
        yield (
            f"parallelism.pp={pp} x stages_per_rank={stages} is {num_stages} stages, and "
            f"model.num_layers={layers}; use fewer"
        )
    if schedule is PipelineSchedule.one_f_one_b:
        if stages > 1:
            yield (
                f"parallelism.stages_per_rank={stages} needs parallelism.pipeline_schedule="
                f"interleaved or zero_bubble, not {schedule.value}; set it to 1"
            )
    elif pp == 1:
        yield (
            f"parallelism.pipeline_schedule={schedule.value} needs parallelism.pp > 1; use "
            "one_f_one_b"
        )
    elif config.num_micro_batches % pp:
        yield (
            f"parallelism.pipeline_schedule={schedule.value} needs a multiple of parallelism.pp="
            f"{pp} micro batches, and a step has {config.num_micro_batches}; change "
            "batch.micro_batch_size or batch.global_batch_size"
        )


def validate_world_size(config: Config) -> Iterator[str]:
    """Require that the layout uses exactly the available processes."""
    tp, pp, dp = config.parallelism.tp, config.parallelism.pp, config.parallelism.dp
    hardware, world_size, per_replica = config.hardware, config.num_processes, tp * pp
    if min(world_size, per_replica) < 1:
        return
    if hardware.processes_per_node is None:
        if hardware.nodes > 1:
            yield (
                f"hardware.nodes={hardware.nodes} needs hardware.processes_per_node, which is "
                "null; set the number of processes of each node"
            )
        return
    available = (
        f"hardware.nodes={hardware.nodes} x processes_per_node={hardware.processes_per_node} "
        f"gives {world_size}"
    )
    if dp is None and world_size % per_replica:
        yield (
            f"parallelism.tp={tp} x pp={pp} needs a multiple of {per_replica} processes, "
            f"{available}; use more nodes or a smaller layout, such as parallelism=single"
        )
    elif dp is not None and dp * per_replica != world_size:
        yield (
            f"parallelism.tp={tp} x pp={pp} x dp={dp} is {dp * per_replica} processes, "
            f"{available}; leave dp null or match them"
        )


def validate_expert_parallel(config: Config) -> Iterator[str]:
    """Require that ep divides dp, and that each expert-parallel rank has an expert."""
    layout, num_experts = config.parallelism, get_mlp_spec(config.model).count_experts(config.model)
    per_replica, ep = layout.tp * layout.pp, layout.ep
    if ep <= 1 or per_replica < 1:
        return
    if num_experts == 0:
        yield (
            f"parallelism.ep={ep} splits experts, and model.mlp.kind={config.model.mlp.kind} has "
            "none; set parallelism.ep=1"
        )
        return
    if ep > num_experts:
        yield (
            f"parallelism.ep={ep} exceeds model.mlp.moe.num_experts={num_experts}; use at most "
            f"{num_experts}"
        )
    dp = layout.dp or config.num_processes // per_replica
    if dp >= 1 and dp % ep:
        yield format_divisibility_error("parallelism.ep", ep, "parallelism.dp", dp)
    elif 1 < layout.dp_replicate < dp and dp // layout.dp_replicate % ep:
        key = "parallelism.dp / parallelism.dp_replicate"
        yield format_divisibility_error("parallelism.ep", ep, key, dp // layout.dp_replicate)


def validate_replicas(config: Config) -> Iterator[str]:
    """Require that replicas are sharded, and that they have equally many ranks, at least two."""
    layout = config.parallelism
    count, per_replica = layout.dp_replicate, layout.tp * layout.pp
    if count <= 1 or per_replica < 1:
        return
    key = f"parallelism.dp_replicate={count}"
    if layout.zero == 0:
        yield (
            f"{key} needs parallelism.zero >= 1, which shards each replica; set "
            "parallelism.zero=3, or parallelism.dp_replicate=1"
        )
    dp = layout.dp or config.num_processes // per_replica
    if dp >= 1 and dp % count:
        yield format_divisibility_error("parallelism.dp_replicate", count, "parallelism.dp", dp)
    elif dp == count:
        yield (
            f"{key} leaves one of parallelism.dp={dp} ranks to each replica, so that nothing is "
            "sharded; set parallelism.dp_replicate=1 parallelism.zero=0"
        )


def validate_batch_size(config: Config) -> Iterator[str]:
    """Require the same number of full micro batches on every data-parallel rank."""
    total, micro = config.batch.global_batch_size, config.micro_batch_size
    layout, world_size = config.parallelism, config.num_processes
    per_replica = layout.tp * layout.pp
    if min(total, micro, world_size, per_replica) < 1:
        return
    dp = layout.dp or max(1, world_size // per_replica)
    if total % (micro * dp):
        valid = _list_divisors(total // dp) if total % dp == 0 else []
        sizes = f"batch.micro_batch_size {_format_choices(valid)}, or " if valid else ""
        nearest = max(1, round(total / (micro * dp))) * micro * dp
        yield (
            f"batch.global_batch_size={total} is not a multiple of batch.micro_batch_size={micro} "
            f"x dp={dp}; use {sizes}batch.global_batch_size={nearest}"
        )


def validate_batch_ramp(config: Config) -> Iterator[str]:
    """Require sizes of the ramp that reach the full batch, in full micro batches on all ranks."""
    ramp, total = config.batch.ramp, config.batch.global_batch_size
    if ramp.start is None:
        return
    increment = ramp.start if ramp.increment is None else ramp.increment
    if ramp.tokens is None:
        yield (
            f"batch.ramp.start={ramp.start} needs batch.ramp.tokens, which is null; set it to the "
            "tokens until the full batch"
        )
    if min(ramp.start, increment, total) < 1:
        return
    if ramp.start >= total or (total - ramp.start) % increment:
        starts = range(total % increment or increment, total, increment)
        remedy = f"batch.ramp.start {_format_choices(starts)}" if starts else "a smaller increment"
        yield (
            f"batch.ramp.start={ramp.start} does not reach batch.global_batch_size={total} in "
            f"increments of {increment}; use {remedy}"
        )
        return
    layout, multiple = config.parallelism, config.micro_batch_size
    multiple *= config.num_processes // max(1, layout.tp * layout.pp)
    unit = "one micro batch on each data-parallel rank"
    if layout.pipeline_schedule is not PipelineSchedule.one_f_one_b:
        multiple *= layout.pp
        unit = f"{layout.pp} micro batches on each data-parallel rank"
    remedy = "a smaller batch.micro_batch_size" if config.micro_batch_size > 1 else "fewer ranks"
    if multiple and total % multiple == 0 and (ramp.start % multiple or increment % multiple):
        yield (
            f"batch.ramp.start={ramp.start} and increment={increment} are not both multiples of "
            f"{multiple}, the sequences of {unit}; use multiples of {multiple}, or {remedy}"
        )


def validate_length_warmup(config: Config) -> Iterator[str]:
    """Require a first length that doubles to sequence_length and that all tp ranks can shard."""
    warmup, length = config.batch.length_warmup, config.batch.sequence_length
    if warmup.start is None:
        return
    if warmup.tokens is None:
        yield (
            f"batch.length_warmup.start={warmup.start} needs batch.length_warmup.tokens, which is "
            "null; set it to the tokens until the full length"
        )
    layout = config.parallelism
    unit = max(1, layout.tp) if layout.sequence_parallel else 1
    choices = [length >> i for i in range(1, length.bit_length()) if length % (unit << i) == 0]
    if choices and warmup.start not in choices:
        yield (
            f"batch.length_warmup.start={warmup.start} does not double to "
            f"batch.sequence_length={length}{f' in parts for tp={unit}' if unit > 1 else ''}; use "
            f"{_format_choices(sorted(one for one in choices if one >= 2))}"
        )
    elif not choices:
        yield (
            f"batch.sequence_length={length} cannot be halved; use "
            "batch.length_warmup.start=null, or an even length"
        )


def validate_compressed_groups(config: Config) -> Iterator[str]:
    """Reject compressed replica groups where the ranks of a group are not consecutive.

    NxD lists the first group only, and the other ranks infer theirs (_build_and_assign_groups in
    its parallel_state.py, which names tp=4).
    """
    name = "NEURON_EXPERIMENTAL_COMPRESS_RG"
    value = config.compiler.environment.get(name)
    if value == "1" and config.parallelism.tp == 4:
        yield (
            f"compiler.environment.{name}={value} needs tensor-parallel groups of consecutive "
            "ranks, which trn1 does not have with parallelism.tp=4; remove it or use another "
            "parallelism.tp"
        )


def validate_spread_groups(config: Config) -> Iterator[str]:
    """Reject tp=4 on trn1 if the data-parallel ranks of a node are not of one pipeline stage.

    NxD spreads each tensor-parallel group over a node there, so that a stage consists of whole
    nodes (initialize_model_parallel in its parallel_state.py).
    """
    hardware, layout = config.hardware, config.parallelism
    is_spread = config.engine.name is EngineBackend.nxd and hardware.name.startswith("trn1")
    if not is_spread or layout.tp != 4 or not hardware.processes_per_node or layout.pp < 1:
        return
    dp, multiple = config.num_processes // (4 * layout.pp), hardware.processes_per_node // 4
    if dp % multiple:
        yield (
            f"parallelism.tp=4 on {hardware.name} with engine=nxd needs a multiple of {multiple} "
            f"data-parallel ranks, and parallelism.pp={layout.pp} leaves {dp}; use "
            f"hardware.nodes={layout.pp}, or another parallelism.tp"
        )


PARALLELISM_VALIDATORS: tuple[Callable[[Config], Iterable[str]], ...] = (
    validate_tensor_parallel,
    validate_sequence_parallel,
    validate_pipeline,
    validate_world_size,
    validate_expert_parallel,
    validate_replicas,
    validate_batch_size,
    validate_batch_ramp,
    validate_length_warmup,
    validate_compressed_groups,
    validate_spread_groups,
)


def format_divisibility_error(key: str, value: int, total_key: str, total: int) -> str:
    """Return the error message for a value that does not divide another, with the valid values."""
    choices = _format_choices(_list_divisors(total))
    return f"{key}={value} does not divide {total_key}={total}; use {choices}"


def _list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _format_choices(values: Iterable[int]) -> str:
    """Return text such as "1, 2, 4 or 8", abbreviated for more than 12 numbers."""
    choices = [str(n) for n in values]
    if len(choices) > 12:
        choices = [*choices[:8], "...", *choices[-2:]]
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]
