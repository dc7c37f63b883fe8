"""Latency and bandwidth of collectives against manual examples."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.distributed.mesh_coordinates import compute_parallel_degrees
from hlat.plan import communication_bytes, communication_time
from hlat.plan.framework_traits import HLAT, FrameworkTraits
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.pipeline_stage_shards import build_stage_shards
from tests.support.planned_stages import UNIT_SPEED

CONSTANTS = HardwareEfficiency(
    1, 1, 1, "a test", overlap=0.75, collective_s=8.0, link_hop_s=3.0, network_hop_s=10.0
)
SPEED = replace(UNIT_SPEED, link=4.0, network=8.0, efficiency=CONSTANTS)
NODES = ("model=7b", "hardware=h100_p5", "hardware.nodes=2", "precision=mixed")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _build_first(config):
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    return mesh, build_stage_shards(config.model, mesh)[0]


@pytest.mark.parametrize(
    ("degree", "stride", "expected"),
    [
        (4, 1, 8 + 3 * 3),  # in a node
        (16, 1, 8 + 14 * 3 + 10),  # two nodes of eight
        (2, 8, 8 + 10),  # one rank of each node
    ],
)
def test_latency_is_that_of_the_hops_of_a_ring(config, degree, stride, expected):
    run = config(*NODES)
    assert communication_time.compute_latency(run, degree, stride, SPEED) == expected


def test_tensor_parallel_collectives_use_links(config):
    run = config(*NODES, "parallelism.tp=4", "parallelism.zero=1")
    mesh, stage = _build_first(run)
    sent = communication_bytes.compute_tensor_parallel_bytes(run, mesh, stage)
    number = 32 * 2 * 4 + 2 * 2
    found = communication_time.compute_tensor_parallel_time(run, mesh, stage, SPEED)
    assert found == pytest.approx(sent / 4 + number * 17)
    single = config(*NODES, "parallelism.zero=1")
    assert (
        communication_time.compute_tensor_parallel_time(single, *_build_first(single), SPEED) == 0
    )


def test_data_parallel_collectives_are_limited_by_link_or_network(config):
    run = config(*NODES, "batch.global_batch_size=16", "batch.micro_batch_size=1")
    mesh, stage = _build_first(run)
    sent = communication_bytes.compute_data_parallel_bytes(run, mesh, stage)
    latency = 32 * 3 * (8 + 14 * 3 + 10)

    def compute(**bandwidths):
        speed = replace(SPEED, **bandwidths)
        return communication_time.compute_data_parallel_time(run, mesh, stage, speed, HLAT)

    assert compute() == pytest.approx(latency + sent / 4)  # one ring has the whole network
    assert compute(network=2.0) == pytest.approx(latency + sent / 2)
    rings = config(*NODES, "parallelism.tp=8", "parallelism.zero=1")
    mesh, stage = _build_first(rings)
    sent = communication_bytes.compute_data_parallel_bytes(rings, mesh, stage)
    found = communication_time.compute_data_parallel_time(rings, mesh, stage, SPEED, HLAT)
    assert found == pytest.approx(32 * 2 * (8 + 10) + sent / (8 / 8))


def test_replicas_of_a_node_gather_over_links_and_sum_over_the_network(config):
    batch = ("batch.global_batch_size=16", "batch.micro_batch_size=1")
    run = config(*NODES, *batch, "parallelism.dp_replicate=2")
    mesh, stage = _build_first(run)
    sent = communication_bytes.compute_data_parallel_bytes(run, mesh, stage)
    found = communication_time.compute_data_parallel_time(run, mesh, stage, SPEED, HLAT)
    assert found == pytest.approx(32 * 3 * (8 + 7 * 3) + sent / 4)
    summed = communication_bytes.compute_replica_bytes(run, mesh, stage)
    assert summed == pytest.approx(stage.numel / 8 * 4)
    found = communication_time.compute_replica_time(run, mesh, stage, SPEED)
    assert found == pytest.approx(32 * 2 * (8 + 10) + summed / (8 / 8))
    single = config(*NODES, *batch)
    assert communication_time.compute_replica_time(single, *_build_first(single), SPEED) == 0


def test_context_parallel_ranks_exchange_keys_and_values(config):
    run = config(*NODES, "parallelism.zero=1", "batch.micro_batch_size=1")
    mesh, stage = _build_first(run)
    traits = FrameworkTraits(context_parallel=2)
    found = communication_time.compute_context_parallel_time(run, mesh, stage, SPEED, traits)
    sent = 4096 * 32 * 2 * 4096 * 2 * 3  # keys, values and gradients in bf16
    assert found == pytest.approx(sent / 4 / 4)
    none = communication_time.compute_context_parallel_time(
        run, mesh, stage, SPEED, FrameworkTraits()
    )
    assert none == 0


def test_all_to_alls_use_links_and_the_network(config):
    """Of 15 other ranks of 16, 7 are on the same node of eight."""
    moe = ("model=mixtral_8x7b", "model.mlp.moe.num_experts=16", "parallelism.zero=1")
    run = config(*NODES[1:], *moe, "parallelism.ep=16", "batch.micro_batch_size=1")
    mesh, stage = _build_first(run)
    sent = communication_bytes.compute_expert_parallel_bytes(run, mesh, stage)
    found = communication_time.compute_expert_parallel_time(run, mesh, stage, SPEED)
    assert found == pytest.approx(sent * (7 / 15 / 4 + 8 / 15 / (8 / 8)))
    run.parallelism.ep = 8
    mesh, stage = _build_first(run)
    sent = communication_bytes.compute_expert_parallel_bytes(run, mesh, stage)
    found = communication_time.compute_expert_parallel_time(run, mesh, stage, SPEED)
    assert found == pytest.approx(sent / 4)
