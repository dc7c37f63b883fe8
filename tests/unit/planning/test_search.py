"""Every valid layout once, each judged as it would be alone."""

import pytest
from omegaconf import OmegaConf

from hlat.config.resolve import resolve
from hlat.planning.memory import estimate
from hlat.planning.search import candidates, layout_problems, nearest, on_more_nodes, search
from hlat.planning.step_time import predict

LARGE = ("model=70b", "hardware=trn1_32xl", "engine=nxd", "compiler=neuron_2_28")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def test_layouts_use_all_processes_and_differ(config):
    wanted = config("model=7b", "hardware=trn1_32xl", "hardware.nodes=4")
    found = [tuple(one.overrides) for one in search(wanted)]
    assert len(set(found)) == len(found) > 50
    for one in candidates(wanted):
        assert 128 % (one.parallelism.tp * one.parallelism.pp) == 0


def test_what_is_found_is_what_training_accepts_and_the_planner_says(compose, config):
    words = (*LARGE, "hardware.nodes=32")
    found = search(config(*words))
    for one in found[::40]:
        alone = resolve(compose(*words, *one.overrides))
        assert not layout_problems(alone)
        assert one.memory == estimate(alone)
        assert one.step_s == predict(alone).total


def test_what_to_type_for_a_layout_names_dp_where_it_was_named(compose, config):
    words = ("parallelism.tp=2", "parallelism.dp=2", "parallelism.pp=1")
    for one in search(config(*words))[::20]:
        alone = resolve(compose(*words, *one.overrides))
        assert alone.num_processes == 4
        assert one.memory == estimate(alone)


def test_the_papers_layout_is_among_them(config):
    (own,) = nearest(config("experiment=hlat_70b"), search(config("experiment=hlat_70b")), 1)
    layout = own.config.parallelism
    assert (layout.tp, layout.pp, layout.zero, own.config.micro_batch_size) == (32, 8, 1, 1)
    assert layout.activation_checkpointing.value == "selective"
    assert own.fits


def test_more_nodes_are_doubled_until_something_fits(config):
    none = config(*LARGE, "precision=mixed", "hardware.nodes=1")
    assert not any(one.fits for one in search(none))
    found = on_more_nodes(none)
    assert {one.config.hardware.nodes for one in found} == {4}
    assert all(one.fits for one in found)
    assert on_more_nodes(config("hardware.memory_gib=0.001")) == []


def test_a_layout_that_processes_cannot_take_is_told_as_such(config):
    (problem,) = layout_problems(config(*LARGE, "hardware.nodes=4"))
    assert problem.startswith("parallelism.tp=32 x pp=8 needs a multiple of 256 processes")
    (zero,) = layout_problems(config("model=7b", "hardware=trn1_32xl", "parallelism.zero=2"))
    assert zero.startswith("parallelism.zero=2 is not in NxD")  # whatever the engine says
