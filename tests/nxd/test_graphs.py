"""Graphs of hlat's engine on NxD, traced on each rank with torch_xla's collectives."""

import functools

import pytest

from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from tests.distributed import checks
from tests.nxd.support.ranks import require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

LAYOUTS = {
    "tp4+sp": "tp=4 sequence_parallel=true",
    "tp8": "tp=8",
    "tp2+dp2+zero1": "tp=2 dp=2 zero=1",
    "tp2+pp2+sp": "tp=2 pp=2 sequence_parallel=true",
}


@pytest.fixture(scope="module")
def trace(compose):
    """Trace a run once per layout and start; return a list of phases per rank."""

    @functools.cache
    def traced(layout: str, start: str):
        config = _configure(compose, layout)
        ranks = run(config.num_processes, "graphs.graphs", config, start, mode="graphs")
        return config, ranks

    return traced


def _configure(compose, layout: str) -> Config:
    settings = LAYOUTS[layout].split()
    overrides = [f"parallelism.{setting}" for setting in settings]
    overrides.append(f"batch.micro_batch_size={2 if 'dp=2' in settings else 4}")
    shape = ("model.num_attention_heads=8", "model.vocab_size=136", "model.num_layers=4")
    return resolve_config(
        compose(*checks.MODEL, *shape, "engine=nxd", "precision=fp32", *overrides)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_pipeline_stage_have_the_same_graphs(trace, layout: str) -> None:
    """Detect Python numbers that differ between ranks: they are constants of the graph."""
    config, ranks = trace(layout, "first")
    size = config.num_processes // config.parallelism.pp
    for start in range(0, len(ranks), size):
        assert any(digests for _, digests, _ in ranks[start])
        for other in ranks[start + 1 : start + size]:
            for (phase, digests, _), (_, expected, _) in zip(other, ranks[start], strict=True):
                assert set(digests) == set(expected), phase


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_steps_have_the_same_graphs(trace, layout: str) -> None:
    """Include a learning rate of zero, and steps after a read, an evaluation, a save, a restore."""
    _, ranks = trace(layout, "first")
    for phases in ranks:
        steps = [digests for phase, digests, _ in phases if phase == "step"]
        assert len(steps) == 5
        assert all(steps[0] == other for other in steps[1:4])
        assert steps[4][-len(steps[0]) :] == steps[0], "after the upload of the restored state"
        reads = {(*digests, num_reads) for phase, digests, num_reads in phases if phase == "read"}
        assert len(reads) == 1
        (graph, num_reads) = reads.pop()
        assert num_reads == 1, f"one transfer of the host after {graph}"
        assert all(num_reads == 0 for phase, _, num_reads in phases if phase == "step")


@pytest.mark.parametrize("layout", ["tp2+dp2+zero1", "tp2+pp2+sp"])
def test_a_restart_has_no_other_graphs(trace, layout: str) -> None:
    """Run only graphs of precompile in the first step after a restore."""
    _, first = trace(layout, "first")
    _, restart = trace(layout, "restart")
    for before, after in zip(first, restart, strict=True):
        traced = {digest for _, digests, _ in before for digest in digests}
        for phase, digests, _ in after:
            assert set(digests) <= traced, phase


@pytest.mark.parametrize("layout", ["tp8", "tp2+dp2+zero1"])
def test_pre_flight_repeats_few_graphs(trace, layout: str) -> None:
    """Limit the number of graphs: compilation in the timed window would make every node slow."""
    config, ranks = trace(layout, "first")
    num_axes = sum(size > 1 for size in (config.parallelism.tp, config.parallelism.dp or 1))
    for (phase, digests, _), *_ in ranks:
        assert phase == "check"
        assert len(set(digests)) <= 5 + 2 * num_axes
