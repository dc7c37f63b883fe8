"""What a run looks at between steps is silent in every layout, and finds a mask that leaks."""

import pytest

from hlat.config.config_errors import ExitCode
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from hlat.recovery import periodic_checks
from tests.distributed import checks, mutants
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LOOKS = 8
LAYOUTS = {
    "": "precision=mixed data.document_mask=true",
    "tp=2 sequence_parallel=true": "precision=bf16_sr",
    "tp=4": "precision=fp32",
    "pp=2": "precision=mixed data.loss_mask=true",
    "dp=2 zero=3": "precision=mixed",
    "tp=2 pp=2 dp=2 zero=1": "precision=bf16_sr_master",
}


class Tracker:
    """Keeps events, as JSON knows them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def log_event(self, event: str, step: int, **details: str) -> None:
        self.events.append(event)

    def print_message(self, text: str) -> None: ...


def looks(config: Config, mutant: str | None) -> tuple[list[ExitCode | None], list[str]]:
    """What comes of some looks after a step, and the events."""
    engine, tracker = NativeEngine(), Tracker()
    with mutants.planted(mutant):
        engine.build(config)
        engine.train_step(checks.own(checks.batches(config, 1)[0], engine), checks.RATE)
        found = [
            periodic_checks.run_periodic_checks(config, engine, tracker, i) for i in range(LOOKS)
        ]
    engine.close()
    return found, tracker.events


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_where_all_is_well(ranks: Ranks, configure, layout: str) -> None:
    config = configure(layout, *LAYOUTS[layout].split())
    for told in ranks.run(config.num_processes, looks, config, None):
        assert told == ([None] * LOOKS, [])


@pytest.mark.parametrize("layout", ["tp=2 sequence_parallel=true", "pp=2", "dp=2 zero=3"])
def test_all_ranks_find_the_future_together(ranks: Ranks, configure, layout: str) -> None:
    config = configure(layout, "precision=fp32")
    every = ranks.run(config.num_processes, looks, config, "one head leaks")
    for found, events in every:
        assert found == every[0][0]
        assert found.count(ExitCode.DIVERGED) == len(events) >= LOOKS // 2
