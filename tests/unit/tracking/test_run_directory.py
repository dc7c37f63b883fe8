"""Symbolic links in a run directory from others."""

from contextlib import ExitStack

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.run import RunConfig
from hlat.report.report_writer import write_report
from hlat.tracking.run_directory import (
    acquire_run_dir,
    is_in_use,
    lock_run_dir,
    remove_if_refused,
)

LINKS = [
    *(".lock", "metrics.jsonl", "events.jsonl", "config.yaml", "report.html", "figures"),
    *("checkpoints", "logs", "wandb", "figures/loss.svg", "logs/rank_0.stacks"),
]


@pytest.mark.parametrize("name", LINKS)
def test_refuse_a_run_directory_with_a_symbolic_link(tmp_path, name):
    victim, link = tmp_path / "victim", tmp_path / "runs" / "x" / name
    victim.write_text("kept")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    run = RunConfig(name="x", root=str(tmp_path / "runs"))
    with (
        pytest.raises(ConfigError, match=f"{name} is a symbolic link to .*victim"),
        acquire_run_dir(run),
    ):
        pass
    (tmp_path / "runs/x/provenance.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        write_report(tmp_path / "runs" / "x")
    assert victim.read_text() == "kept"


def test_links_of_the_launcher_and_wandb_are_allowed(tmp_path):
    for name in ("wandb/latest-run", "submissions/1"):
        link = tmp_path / "x" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path)
    with acquire_run_dir(RunConfig(name="x", root=str(tmp_path))) as run_dir:
        assert (run_dir / ".lock").is_file()


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_refused_run_removes_its_directory_unless_another_process_uses_it(tmp_path, is_locked):
    run_dir = tmp_path / "x"
    with ExitStack() as locks:

        def start() -> None:
            with remove_if_refused(run_dir):
                run_dir.mkdir()
                if is_locked:  # by a process that starts the same run at the same time
                    locks.enter_context(lock_run_dir(run_dir))
                raise ConfigError("refused")

        with pytest.raises(ConfigError):
            start()
        assert run_dir.exists() is is_locked


def test_a_directory_in_use_is_recognized_without_writing(tmp_path) -> None:
    assert not is_in_use(tmp_path / "missing")
    assert not is_in_use(tmp_path)
    assert not [*tmp_path.iterdir()]
    with lock_run_dir(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)
