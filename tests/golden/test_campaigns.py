"""Dry runs of campaigns of the package."""

from pathlib import Path

import pytest

from hlat.jobs import campaign

GOLDEN = Path(__file__).with_name("campaigns")


@pytest.mark.parametrize("name", ["anneal_tiny", "hlat_70b"])
def test_dry_run_is_as_recorded(name: str, capsys, pytestconfig) -> None:
    assert campaign.main([name, "dry_run=true"]) == 0
    now, file = capsys.readouterr().out, GOLDEN / f"{name}.txt"
    if pytestconfig.getoption("--update"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(now)
    assert now == file.read_text(), "it changed; if meant: pytest tests/golden --update"
