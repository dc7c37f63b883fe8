"""Periodic checks find nothing in a correct run of every layout, and find a mask that leaks."""

import pytest

from hlat.config.config_errors import ExitCode
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from hlat.recovery import periodic_checks
from tests.distributed import checks, mutants
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

NUM_CHECKS = 8
LAYOUTS = {
    "": "precision=mixed data.document_mask=true",
    "tp=2 sequence_parallel=true": "precision=bf16_sr",
    "tp=4": "precision=fp32",
    "pp=2": "precision=mixed data.loss_mask=true",
    "dp=2 zero=3": "precision=mixed",
    "tp=2 pp=2 dp=2 zero=1": "precision=bf16_sr_master",
}
DEFAULT = {"", "tp=4", "pp=2", "dp=2 zero=3"}


class Tracker:
    """Recorder of events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def log_event(self, event: str, step: int, **details: str) -> None:
        self.events.append(event)

    def print_message(self, text: str) -> None: ...


def run_checks(config: Config, mutant: str | None) -> tuple[list[ExitCode | None], list[str]]:
    """Return the exit codes of some checks after a step, and the events."""
    engine, tracker = NativeEngine(), Tracker()
    with mutants.planted(mutant):
        engine.build(config)
        engine.train_step(checks.shard_batch(checks.batches(config, 1)[0], engine), checks.RATE)
        found = [
            periodic_checks.run_periodic_checks(config, engine, tracker, i)
            for i in range(NUM_CHECKS)
        ]
    engine.close()
    return found, tracker.events


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[] if each in DEFAULT else [pytest.mark.slow]) for each in LAYOUTS],
)
@pytest.mark.slow_after(2)
def test_correct_layout_has_no_finding(ranks: Ranks, configure, layout: str) -> None:
    config = configure(layout, *LAYOUTS[layout].split())
    for result in ranks.run(config.num_processes, run_checks, config, None):
        assert result == ([None] * NUM_CHECKS, [])


@pytest.mark.parametrize(
    "layout",
    [
        "tp=2 sequence_parallel=true",
        "pp=2",
        pytest.param("dp=2 zero=3", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_find_a_leaking_mask(ranks: Ranks, configure, layout: str) -> None:
    config = configure(layout, "precision=fp32")
    every = ranks.run(config.num_processes, run_checks, config, "one head leaks")
    for found, events in every:
        assert found == every[0][0]
        assert found.count(ExitCode.DIVERGED) == len(events) >= NUM_CHECKS // 2
