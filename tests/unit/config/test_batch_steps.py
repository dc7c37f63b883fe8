"""Sizes, lengths and token counts of the steps within a ramp."""

from itertools import accumulate, islice

import pytest

from hlat.config.batch import BatchConfig, BatchRampConfig, LengthWarmupConfig
from hlat.config.batch_steps import (
    compute_schedule_step,
    count_full_batches,
    count_steps,
    count_tokens,
    get_batch_size,
    get_sequence_length,
    list_batch_shapes,
    list_batch_stages,
)
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.config.run_steps import compute_extension, compute_total_steps, is_milestone
from hlat.doctor.reference_packing import iter_batch_sizes
from hlat.optim.lr_schedule import compute_lr

RAMPS = [
    BatchRampConfig(2, 2, 300),
    BatchRampConfig(2, None, 301),
    BatchRampConfig(4, 4, 1),
    BatchRampConfig(6, 2, 10_000),
    BatchRampConfig(2, 6, 999),
]


def run(compose, *overrides: str) -> Config:
    return resolve_config(compose(*overrides))


def build_batch(ramp: BatchRampConfig | None = None, **settings) -> BatchConfig:
    return BatchConfig(8, 2, 16, ramp=ramp or BatchRampConfig(), **settings)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_sizes_and_tokens_of_each_step(ramp: BatchRampConfig) -> None:
    batch = build_batch(ramp)
    sizes = [*islice(iter_batch_sizes(batch), 400)]
    assert sizes[0] == ramp.start
    assert sizes[-1] == 8
    assert [get_batch_size(step, batch) for step in range(400)] == sizes
    tokens = [0, *accumulate(16 * size for size in sizes)]
    assert [count_tokens(step, batch) for step in range(401)] == tokens
    for step in range(1, 400):
        assert count_steps(tokens[step], batch) == step
        assert count_steps(tokens[step] - 1, batch) == step
        assert count_steps(tokens[step] + 1, batch) == step + 1
        assert count_full_batches(step, batch) == -(-tokens[step] // 128)
        assert compute_schedule_step(step, batch) == tokens[step] / 128
    shapes = list_batch_shapes(400, batch)
    assert [shape.size for shape in shapes for _ in range(shape.num_steps)] == sizes
    assert {shape.length for shape in shapes} == {16}


def test_a_batch_without_ramp() -> None:
    batch = build_batch()
    assert list_batch_stages(batch) == [(0, 0, 8)]
    assert count_steps(0, batch) == 0
    assert count_tokens(10**6, batch) == 128 * 10**6
    assert count_steps(128 * 10**6, batch) == 10**6
    assert isinstance(compute_schedule_step(5, batch), int)


def test_the_length_doubles_by_tokens() -> None:
    warmup = LengthWarmupConfig(2, 3 * 256)
    batch = build_batch(length_warmup=warmup)
    assert [get_sequence_length(step, batch) for step in range(8)] == [2, 2, 4, 4, 8, 8, 16, 16]
    assert list_batch_shapes(8, batch) == [(2, 8, 2), (2, 8, 4), (2, 8, 8), (2, 8, 16)]
    assert list_batch_shapes(3, batch) == [(2, 8, 2), (1, 8, 4)]
    both = build_batch(BatchRampConfig(4, 4, 256), length_warmup=warmup)
    assert list_batch_shapes(10, both) == [(4, 4, 2), (2, 8, 4), (2, 8, 8), (2, 8, 16)]


def test_the_rate_depends_on_the_tokens(compose) -> None:
    """After the same tokens, the rate is that of a run without ramp."""
    words = [
        "batch.global_batch_size=8",
        "batch.micro_batch_size=2",
        "schedule.total_steps=64",
        "schedule.warmup_steps=9",
    ]
    plain = run(compose, *words)
    ramp = run(compose, *words, "batch.ramp.start=2", f"batch.ramp.tokens={8 * 2048}")
    assert compute_total_steps(plain) == 64
    steps = compute_total_steps(ramp)
    assert count_tokens(steps - 1, ramp.batch) < 64 * 2048 <= count_tokens(steps, ramp.batch)
    positions = {compute_schedule_step(step, ramp.batch): step for step in range(steps)}
    common = [step for step in range(64) if step in positions]
    assert len(common) > 50
    for step in common:
        assert compute_lr(positions[step], ramp) == compute_lr(step, plain)
    rates = [compute_lr(step, ramp) for step in range(steps)]
    assert rates.index(max(rates)) > plain.schedule.warmup_steps


def test_milestones_and_extension_count_tokens(compose) -> None:
    config = run(
        compose,
        *("batch.global_batch_size=8", "batch.micro_batch_size=2", "schedule.total_steps=64"),
        "schedule.warmup_steps=9",
        *("batch.ramp.start=2", "batch.ramp.tokens=16384", "checkpoint.milestone_tokens=8192"),
    )
    steps = compute_total_steps(config)
    milestones = [step for step in range(1, steps + 1) if is_milestone(step, config)]
    assert len(milestones) == 64 * 2048 // 8192
    for i, step in enumerate(milestones, start=1):
        tokens = [count_tokens(n, config.batch) for n in (step - 1, step)]
        assert tokens[0] < 8192 * i <= tokens[1]
    assert compute_extension(config, steps) == {
        "schedule.total_steps": count_full_batches(2 * steps, config.batch)
    }


def test_micro_batches_divide_every_size(compose) -> None:
    config = run(
        compose,
        *("batch.global_batch_size=16", "batch.ramp.start=4", "batch.ramp.increment=6"),
        "batch.ramp.tokens=9999",
    )
    assert config.micro_batch_size == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["batch.ramp.start=3"],
            "batch.ramp.start=3 does not reach batch.global_batch_size=8 in increments of 3; use "
            "batch.ramp.start 2 or 5",
        ),
        (
            ["batch.ramp.start=8"],
            "batch.ramp.start=8 does not reach batch.global_batch_size=8 in increments of 8; "
            "use a smaller increment",
        ),
        (
            ["batch.ramp.start=2", "batch.micro_batch_size=4"],
            "batch.ramp.start=2 and increment=2 are not both multiples of 4, the sequences of one "
            "micro batch on each data-parallel rank; use multiples of 4, or a smaller "
            "batch.micro_batch_size",
        ),
        (
            ["batch.ramp.start=4", "batch.ramp.tokens=null"],
            "batch.ramp.start=4 needs batch.ramp.tokens, which is null; set it to the tokens until "
            "the full batch",
        ),
        (
            ["batch.ramp.tokens=null", "batch.length_warmup.start=48"],
            "batch.length_warmup.start=48 does not double to batch.sequence_length=256; use 2, 4, "
            "8, 16, 32, 64 or 128",
        ),
        (
            ["batch.ramp.start=4", "engine=nxd", "compiler=neuron_2_28", "hardware=trn1_32xl"],
            "batch.ramp.start=4 is not supported by engine=nxd: NxD splits each step into the same "
            "number of micro batches; use batch.ramp.start=null, or engine=native",
        ),
    ],
)
def test_refused_values(compose, words: list[str], message: str) -> None:
    settings = {"batch.global_batch_size": 8, "batch.ramp.tokens": 4096}
    given = {word.partition("=")[0] for word in words}
    defaults = [f"{key}={value}" for key, value in settings.items() if key not in given]
    with pytest.raises(ConfigError) as caught:
        run(compose, *defaults, *words)
    assert message in caught.value.problems
