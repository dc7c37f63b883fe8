"""Dry run of the campaign of the HLAT paper."""

from pathlib import Path

from hlat.jobs import campaign

GOLDEN = Path(__file__).with_name("campaigns")


def test_dry_run_of_hlat_70b_is_as_recorded(capsys, pytestconfig) -> None:
    assert campaign.main(["hlat_70b", "dry_run=true"]) == 0
    now, file = capsys.readouterr().out, GOLDEN / "hlat_70b.txt"
    if pytestconfig.getoption("--update"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(now)
    assert now == file.read_text(), "it changed; if meant: pytest tests/golden --update"
