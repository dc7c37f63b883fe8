"""Every valid layout once, each judged as it would be alone."""

import pytest
from omegaconf import OmegaConf

from hlat.config.resolve import resolve_config
from hlat.plan.layout_search import (
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


def test_layouts_use_all_processes_and_differ(config):
    wanted = config("model=7b", "hardware=trn1_32xl", "hardware.nodes=4")
    result = [tuple(one.overrides) for one in search_layouts(wanted)]
    assert len(set(result)) == len(result) > 50
    for one in generate_layouts(wanted):
        assert 128 % (one.parallelism.tp * one.parallelism.pp) == 0


def test_what_is_found_is_what_training_accepts_and_the_planner_says(compose, config):
    args = (*LARGE, "hardware.nodes=32")
    result = search_layouts(config(*args))
    for one in result[::90]:
        alone = resolve_config(compose(*args, *one.overrides))
        assert not find_layout_problems(alone)
        assert one.memory == estimate_memory(alone)
        assert one.step_s == predict_step_time(alone).total


def test_what_to_type_for_a_layout_names_dp_where_it_was_named(compose, config):
    args = ("parallelism.tp=2", "parallelism.dp=2", "parallelism.pp=1")
    for one in search_layouts(config(*args))[::20]:
        alone = resolve_config(compose(*args, *one.overrides))
        assert alone.num_processes == 4
        assert one.memory == estimate_memory(alone)


def test_the_papers_layout_is_among_them(config):
    wanted = config("experiment=hlat_70b")
    (own,) = find_nearest_layouts(wanted, search_layouts(wanted), 1)
    layout = own.config.parallelism
    assert (layout.tp, layout.pp, layout.zero, own.config.micro_batch_size) == (32, 8, 1, 1)
    assert layout.activation_checkpointing.value == "selective"
    assert own.fits


def test_more_nodes_are_doubled_until_something_fits(config):
    none = config(*LARGE, "precision=mixed", "hardware.nodes=1")
    assert not any(one.fits for one in search_layouts(none))
    result = search_more_nodes(none)
    assert {one.config.hardware.nodes for one in result} == {4}
    assert all(one.fits for one in result)
    assert search_more_nodes(config("hardware.memory_gib=0.001")) == []


def test_a_layout_that_processes_cannot_take_is_told_as_such(config):
    (problem,) = find_layout_problems(config(*LARGE, "hardware.nodes=4"))
    assert problem.startswith("parallelism.tp=32 x pp=8 needs a multiple of 256 processes")
    (zero,) = find_layout_problems(config("model=7b", "hardware=trn1_32xl", "parallelism.zero=2"))
    assert zero.startswith(
        "parallelism.zero=2 is not supported by engine=nxd"
    )  # whatever the engine says
