"""Search of layouts: each valid one once, with the estimates of a single plan."""

from dataclasses import replace
from itertools import product

import pytest
from omegaconf import OmegaConf

from hlat.config.engine_capabilities import ENGINE_CAPABILITIES
from hlat.config.parallelism import (
    ActivationCheckpointing,
    ParallelismConfig,
    PipelineSchedule,
)
from hlat.config.resolve import resolve_config
from hlat.plan.layout_search import (
    LayoutCandidate,
    count_equal_layouts,
    find_layout_problems,
    find_nearest_layouts,
    generate_layouts,
    search_layouts,
    search_more_nodes,
)
from hlat.plan.memory_estimate import estimate_memory
from hlat.plan.step_time import predict_step_time

LARGE = ("model=70b", "hardware=trn1_32xl", "engine=nxd", "compiler=neuron_2_28")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


@pytest.mark.slow
def test_layouts_are_unique_and_use_all_processes(config):
    run = config("model=7b", "hardware=trn1_32xl", "hardware.nodes=4")
    result = [tuple(one.overrides) for one in search_layouts(run)]
    assert len(set(result)) == len(result) > 50
    for one in generate_layouts(run):
        assert 128 % (one.parallelism.tp * one.parallelism.pp) == 0


@pytest.mark.slow
def test_found_layouts_are_valid_with_the_estimates_of_the_planner(compose, config):
    args = (*LARGE, "hardware.nodes=32")
    result = search_layouts(config(*args))
    for one in result[::90]:
        resolved = resolve_config(compose(*args, *one.overrides))
        assert not find_layout_problems(resolved)
        assert one.memory == estimate_memory(resolved)
        assert one.step_s == predict_step_time(resolved).total


def test_search_finds_every_valid_layout(config):
    """Compare with all combinations of the settings on four processes."""
    run = config("parallelism.dp=4", "model.num_layers=8", "precision=bf16")
    expected = set()
    sizes, degrees = (1, 2, 4, 8, 16), (1, 2, 4)
    schedules = [*product(PipelineSchedule, (1, 2, 3, 4, 8))]
    for tp, pp, zero, mode, size in product(
        degrees, degrees, range(4), ActivationCheckpointing, sizes
    ):
        for schedule, stages in schedules:
            is_equal_size = 8 % (pp * stages) == 0
            is_single = schedule is PipelineSchedule.one_f_one_b
            dp = 4 // (tp * pp)
            if dp == 0 or not is_equal_size or is_single != (stages == 1) or (dp == 1 and zero):
                continue
            layout = ParallelismConfig(
                tp,
                pp,
                dp,
                sequence_parallel=tp > 1,
                zero=zero,
                pipeline_schedule=schedule,
                stages_per_rank=stages,
                activation_checkpointing=mode,
            )
            batch = replace(run.batch, micro_batch_size=size)
            if not find_layout_problems(replace(run, parallelism=layout, batch=batch)):
                expected.add((*vars(layout).values(), size))
    found = search_layouts(run)
    keys = [(*vars(one.config.parallelism).values(), one.config.micro_batch_size) for one in found]
    assert set(keys) == expected
    assert len(keys) == len(expected)
    assert {one.config.parallelism.pipeline_schedule for one in found} == set(PipelineSchedule)


@pytest.mark.parametrize("model", ["llama_tiny", "mixtral_tiny"])
def test_costs_of_pipeline_schedules_are_those_of_a_single_plan(compose, config, model):
    """Of the eight layers of mixtral_tiny, the first two are dense."""
    args = (f"model={model}", "hardware=a100_p4d", "precision=bf16", "model.num_layers=8")
    if model == "mixtral_tiny":
        args += ("model.mlp.moe.num_dense_layers=2", "model.mlp.moe.num_experts=2")
    found = search_layouts(config(*args))
    several = [one for one in found if one.config.parallelism.stages_per_rank > 1]
    assert len(several) > 20
    schedules = {one.config.parallelism.pipeline_schedule for one in several[::7]}
    assert schedules == {PipelineSchedule.interleaved, PipelineSchedule.zero_bubble}
    for one in several[::7]:
        resolved = resolve_config(compose(*args, *one.overrides))
        assert one.memory == estimate_memory(resolved)
        assert one.step_s == predict_step_time(resolved).total


def test_replicas_of_zero_3_have_all_processes_of_nodes(compose, config):
    args = ("model=1b", "hardware=h100_p5", "hardware.nodes=16", "precision=mixed")
    args += ("parallelism=fsdp", "batch.global_batch_size=128", "batch.micro_batch_size=1")
    found = search_layouts(config(*args))
    layouts = {(p.tp, p.pp, p.zero, p.dp_replicate) for p in (f.config.parallelism for f in found)}
    assert {layout[-1] for layout in layouts if layout[:3] == (1, 1, 3)} == {1, 2, 16}
    assert {layout[-1] for layout in layouts if layout[:3] == (8, 1, 3)} == {1, 2}
    assert {layout[-1] for layout in layouts if layout[2] < 3} == {1}
    replicated = [one for one in found if one.config.parallelism.dp_replicate > 1]
    for one in replicated[::20]:
        resolved = resolve_config(compose(*args, *one.overrides))
        assert one.memory == estimate_memory(resolved)
        assert one.step_s == predict_step_time(resolved).total


def test_overrides_of_layouts_contain_dp_if_it_was_set(compose, config):
    args = ("parallelism.tp=2", "parallelism.dp=2", "parallelism.pp=1")
    for one in search_layouts(config(*args))[::20]:
        resolved = resolve_config(compose(*args, *one.overrides))
        assert resolved.num_processes == 4
        assert one.memory == estimate_memory(resolved)


def test_layout_of_the_paper_is_found(config):
    run = config("experiment=hlat_70b")
    (nearest,) = find_nearest_layouts(run, search_layouts(run), 1)
    layout = nearest.config.parallelism
    assert (layout.tp, layout.pp, layout.zero, nearest.config.micro_batch_size) == (32, 8, 1, 1)
    assert layout.activation_checkpointing.value == "selective"
    assert nearest.fits


@pytest.mark.slow
def test_nodes_are_doubled_until_a_layout_fits(config):
    small_config = config(*LARGE, "precision=mixed", "hardware.nodes=1")
    assert not any(one.fits for one in search_layouts(small_config))
    result = search_more_nodes(small_config)
    assert {one.config.hardware.nodes for one in result} == {4}
    assert all(one.fits for one in result)
    assert search_more_nodes(config("hardware.memory_gib=0.001")) == []


@pytest.mark.slow
def test_problems_of_invalid_layouts(config):
    (problem,) = find_layout_problems(config(*LARGE, "hardware.nodes=4"))
    assert problem.startswith("parallelism.tp=32 x pp=8 needs a multiple of 256 processes")
    (zero,) = find_layout_problems(config("model=7b", "hardware=trn1_32xl", "parallelism.zero=2"))
    assert zero.startswith(
        "parallelism.zero=2 is not supported by engine=nxd"
    )  # the message is that of the engine


def test_layouts_of_experts_divide_them_among_data_parallel_ranks(compose, config):
    args = ("model=mixtral_tiny", "model.mlp.moe.num_experts=3", "parallelism.dp=4")
    found = search_layouts(config(*args))
    layouts = [one.config.parallelism for one in found]
    pairs = {(one.dp, one.ep) for one in layouts}
    assert pairs == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)}
    for one in found[::20]:
        resolved = resolve_config(compose(*args, *one.overrides))
        assert one.memory == estimate_memory(resolved)


def test_a_layout_with_another_number_of_experts_per_rank_is_farther(config):
    run = config("model=mixtral_tiny", "parallelism.dp=4", "parallelism.ep=2")
    nearest = find_nearest_layouts(run, search_layouts(run), 3)
    assert nearest[0].config.parallelism == run.parallelism


def test_layouts_are_equal_if_their_intervals_overlap(config):
    """The interval of layouts on H100 is a factor of 0.934 to 1.071."""
    run = config("model=7b", "hardware=h100_p5")
    memory = estimate_memory(run)

    def count(*times):
        return count_equal_layouts([LayoutCandidate(run, memory, True, time) for time in times])

    assert count(1.0, 1.05, 1.14) == 3
    assert count(1.0, 1.05, 1.15) == 2
    assert count(1.0) == 1
    assert count_equal_layouts([LayoutCandidate(run, memory, False, 1.0)]) == 0
    assert count_equal_layouts([LayoutCandidate(run, memory, True, None)]) == 0


def test_layout_limits_do_not_read_the_micro_batch_size():
    """The search evaluates them once for all micro batch sizes."""
    for capabilities in ENGINE_CAPABILITIES.values():
        for limit in capabilities.layout_limits:
            refused = limit.refused if isinstance(limit.refused, list) else [limit.refused]
            keys = {key for conditions in refused for key in conditions}
            assert not any(key.startswith("batch.") for key in keys), limit.keys
