"""Launchers that a campaign refuses before its first stage."""

from pathlib import Path

import pytest

from hlat.jobs import campaign


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hydra/launcher=skypilot"], "hydra/launcher=skypilot does not run campaigns"),
        (
            ["hydra/launcher=slurm", "hydra.launcher.dry_run=true"],
            "use hlat campaign anneal_tiny dry_run=true",
        ),
        (
            ["hydra/launcher=kubernetes", "hydra.launcher.dry_run=true"],
            "use hlat campaign anneal_tiny dry_run=true",
        ),
    ],
)
def test_a_launcher_that_cannot_run_stages_is_refused(
    tmp_path: Path, monkeypatch, capsys, overrides: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert campaign.main(["anneal_tiny", *overrides]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/trunk"))
