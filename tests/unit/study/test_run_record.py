"""A record contains all readable lines and the number of the others."""

import math
from pathlib import Path

import numpy as np
import pytest

from hlat.study.run_record import load_run_record


@pytest.mark.parametrize(
    "torn",
    ['{"step": 1}, {"step": 2}', '{"step": 1', "[]", "3", '{"step": {}', '"x": {}}', "{" * 100_000],
)
def test_unreadable_lines_are_counted_and_others_are_read(tmp_path: Path, torn: str) -> None:
    lines = ['{"step": 5}', torn, "", '{"step": 6}', '{"step": 7}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = load_run_record(tmp_path)
    assert [row["step"] for row in found.metrics] == [5, 6, 7]
    assert found.num_unreadable == 1


def test_columns_contain_numeric_values_only(tmp_path: Path) -> None:
    rows = ['{"a": 1}', '{"a": 2.5}', '{"a": null}', "{}", '{"a": "7"}', '{"a": [1]}', '{"a": NaN}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    found = load_run_record(tmp_path)
    expected = [1.0, 2.5, *[math.nan] * 5]
    np.testing.assert_array_equal(found.get_column("a"), expected)
    np.testing.assert_array_equal(found.get_column("b"), [math.nan] * 7)
    assert found.get_column("a") is found.get_column("a")


def test_profiles_are_read_in_the_order_of_steps_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder = tmp_path / "profiles"
    folder.mkdir()
    for name in ("step_10_rank_0", "step_9_rank_10", "step_9_rank_2"):
        (folder / f"{name}_account.json").write_text('{"seconds": 1.5}')
    (folder / "step_11_rank_0_account.json").write_text('{"seconds": ')
    (folder / "step_12_rank_0_account.json").write_text("[1]")
    (folder / "step_x_rank_0_account.json").write_text('{"seconds": 1}')
    (folder / "step_13_rank_0_modules.csv").write_text("module\n")
    found = load_run_record(tmp_path).profiles
    assert [*found] == ["step_9_rank_2", "step_9_rank_10", "step_10_rank_0"]
    assert found["step_10_rank_0"] == {"seconds": 1.5}
