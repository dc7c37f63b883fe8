"""Rollbacks of a run, in rollbacks.json or in the events of earlier versions."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hlat.checkpoint.rollback_log import Rollback, load_rollbacks, save_rollbacks
from hlat.config.config_errors import ConfigError
from hlat.distributed.object_group import SingleRankGroup

BAD_BOUNDS = [0, 10**12], [4, 22], [6, 4], [-1, 3], [1], [1, 2, 3], ["1", 2], [1.5, 2], None, {}


def load(directory: Path, *bounds: object) -> list[Rollback]:
    """Load the rollbacks of a run of 20 steps, whose events have rollbacks of `bounds`."""
    rows = [{"event": "rollback", "to": 3, "left_out": value} for value in bounds]
    tracker = SimpleNamespace(get_events=lambda event: rows)
    return load_rollbacks(directory, 20, SingleRankGroup(), tracker)  # type: ignore[arg-type]


def test_later_rollbacks_may_skip_batches_that_replaced_skipped_ones(tmp_path: Path) -> None:
    expected = [Rollback(3, range(4, 6)), Rollback(3, range(18, 22))]
    assert load(tmp_path, [4, 6], [18, 22]) == expected
    save_rollbacks(tmp_path, expected)
    assert load(tmp_path) == load(tmp_path, [7, 8]) == expected, "the events are not read"


@pytest.mark.parametrize("bounds", BAD_BOUNDS)
def test_refuse_batches_that_the_run_cannot_have_read(bounds: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^events\.jsonl has the rollback \[3, .* at most 20"):
        load(tmp_path, bounds)
    (tmp_path / "rollbacks.json").write_text(json.dumps([{"to": 3, "skipped": bounds}]))
    with pytest.raises(ConfigError, match=r"/rollbacks\.json has the rollback \[3, .*: correct it"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "3", "[3]", "[{}]", '{"to": 3}', "[" * 10**5])
def test_refuse_a_damaged_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "rollbacks.json").write_text(content)
    with pytest.raises(ConfigError, match=r"/rollbacks\.json has the rollback None"):
        load(tmp_path)


def test_refuse_a_rollback_to_no_step(tmp_path: Path) -> None:
    (tmp_path / "rollbacks.json").write_text('[{"to": null, "skipped": [1, 2]}]')
    with pytest.raises(ConfigError, match="has the rollback"):
        load(tmp_path)
