"""The engine gets its device from torch, so a device unknown to hlat works as well."""

import json
from collections.abc import Iterator

import pytest

from hlat.config.parallelism import ActivationCheckpointing
from hlat.distributed.mesh_coordinates import compute_parallel_degrees
from hlat.plan import communication_bytes
from hlat.plan.memory_estimate import estimate_memory
from hlat.plan.pipeline_stage_shards import build_stage_shards
from hlat.precision.precision_bytes import get_itemsize
from tests.distributed import shim
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


@pytest.fixture(scope="module")
def several() -> Iterator[Ranks]:
    """Start separate processes, because a registered device cannot be removed."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


CASES = [
    ("", "fp32"),
    pytest.param("", "bf16_sr", marks=pytest.mark.slow),
    pytest.param("dp=2 zero=1", "mixed", marks=pytest.mark.slow),
    ("dp=2 zero=3 activation_checkpointing=selective", "mixed"),
    pytest.param("tp=2 sequence_parallel=true", "bf16_sr_master", marks=pytest.mark.slow),
    pytest.param("pp=2", "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "recipe"), CASES)
@pytest.mark.slow_after(1)
def test_unknown_device_trains_like_the_cpu(
    several: Ranks, configure, layout: str, recipe: str
) -> None:
    # FSDP2 pads the rows of a tensor subclass once more in its first forward pass, as a copy
    overrides = (f"precision={recipe}", "model.vocab_size=132")
    found, expected = (
        several.run(config.num_processes, shim.train, config, 2)
        for device in ("shim", "cpu")
        for config in [configure(layout, *overrides, f"engine.device={device}")]
    )
    # Attention is fused on the CPU only, so the order of sums differs, with bf16 rounding
    relative = 1e-6 if recipe == "fp32" else 2**-8
    for rank, same in zip(found, expected, strict=True):
        for row, numbers in zip(rank, same, strict=True):
            assert row == pytest.approx(numbers, rel=relative)


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("dp=2 zero=1", "mixed"),
        pytest.param("", "bf16_sr_master", marks=pytest.mark.slow),
        pytest.param("", "bf16_sr", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_step_reads_nothing_from_the_device(
    several: Ranks, configure, layout: str, recipe: str
) -> None:
    config = configure(layout, f"precision={recipe}", "engine.device=shim")
    for in_steps, in_item in several.run(config.num_processes, shim.record_reads, config, 2):
        assert in_steps == []
        assert in_item == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("recipe", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_unknown_device_passes_preflight(several: Ranks, configure, tmp_path, recipe: str) -> None:
    config = configure("dp=2", f"precision={recipe}", "engine.device=shim")
    assert several.run(2, shim.passes_preflight, config, str(tmp_path)) == [True, True]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["failed"] == []
    assert {node["device"] for node in event["nodes"].values()} == {"shim:0"}


STATISTIC = 1000
"""Elements of the largest tensor that is a norm's weight, a metric or a statistic of the loss."""


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("dp=2 zero=1 activation_checkpointing=selective", "mixed"),
        ("dp=2 zero=3 activation_checkpointing=selective", "mixed"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [  # three seconds each
                ("tp=2 sequence_parallel=true activation_checkpointing=selective", "mixed"),
                ("dp=2 activation_checkpointing=selective", "fp32"),
                ("dp=2 zero=2", "mixed"),
                ("dp=2 zero=3", "bf16"),
                ("dp=4 zero=1 dp_replicate=2", "mixed"),
                ("dp=4 zero=3 dp_replicate=2", "mixed"),
                ("tp=2", "bf16"),
                ("pp=2", "bf16"),
            ]
        ),
    ],
)
@pytest.mark.slow_after(1)
def test_a_step_allocates_and_sends_what_the_planner_states(
    several: Ranks, configure, layout: str, recipe: str
) -> None:
    count = 4 if "dp=4" in layout else 2
    hardware = ("hardware=trn2_48xl", f"hardware.processes_per_node={count}", "engine.device=shim")
    config = configure(layout, f"precision={recipe}", "model.vocab_size=132", *hardware)
    mesh, zero = compute_parallel_degrees(config.parallelism, count), config.parallelism.zero
    plan, stage = estimate_memory(config), build_stage_shards(config.model, mesh)[0]
    found = several.run(count, shim.measure_step, config)

    fullest = max(found, key=lambda usage: usage.before)
    weights = plan.weights if zero < 2 else 0
    if zero > 1 and not plan.master_weights:  # the sharded copy of the gathered weights
        weights = stage.numel / mesh.dp_shard * get_itemsize(config.precision.param_dtype)
    state = weights + plan.master_weights + plan.optimizer_state
    # ZeRO-1 has the vectors whole on each rank; a step count per tensor has 4 bytes
    assert fullest.before == pytest.approx(state, rel=0.005)
    # ZeRO-1 frees the gradients of rows that another rank updates before the update
    gradients = plan.accumulation / (mesh.dp_shard if zero == 1 else 1)
    assert fullest.at_update - fullest.before == pytest.approx(gradients, rel=0.005)

    if config.parallelism.activation_checkpointing is ActivationCheckpointing.selective:
        # The device has no fused attention, and the plan lacks the reduced gradients of ZeRO-1
        assert fullest.peak == pytest.approx(plan.total - plan.reserve, rel=0.12)

    sent = sum(size for usage in found for numel, size in usage.sent.items() if numel > STATISTIC)
    micro_batches = config.num_micro_batches
    planned = (
        communication_bytes.compute_pipeline_bytes(config, mesh) * micro_batches
    )  # of both ends
    planned += (
        2 * micro_batches * communication_bytes.compute_tensor_parallel_bytes(config, mesh, stage)
    )
    planned += count * communication_bytes.compute_data_parallel_bytes(config, mesh, stage)
    planned += count * communication_bytes.compute_replica_bytes(config, mesh, stage)
    assert sent == pytest.approx(planned, rel=0.005)
