"""Batches that rollbacks in events.jsonl skip."""

from types import SimpleNamespace

import pytest

from hlat.checkpoint.resume import load_skipped_batches
from hlat.config.config_errors import ConfigError
from hlat.distributed.object_group import SingleRankGroup


def load(*bounds: object) -> list[range]:
    config = SimpleNamespace(schedule=SimpleNamespace(total_steps=20))
    rows = [{"event": "rollback", "left_out": value} for value in bounds]
    tracker = SimpleNamespace(get_events=lambda event: rows)
    return load_skipped_batches(config, SingleRankGroup(), tracker)  # type: ignore[arg-type]


def test_later_rollbacks_may_skip_batches_that_replaced_skipped_ones() -> None:
    assert load([4, 6], [18, 22]) == [range(4, 6), range(18, 22)]


@pytest.mark.parametrize(
    "bounds", [[0, 10**12], [4, 22], [6, 4], [-1, 3], [1], [1, 2, 3], ["1", 2], [1.5, 2], None, {}]
)
def test_refuse_batches_that_the_run_cannot_have_read(bounds: object) -> None:
    with pytest.raises(ConfigError, match=r"events\.jsonl has a rollback that skips"):
        load(bounds)
