"""Lookup of the checkpoint for a run, and messages that list the available ones."""

from pathlib import Path

import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_lookup import find_checkpoint
from hlat.config.config_errors import ConfigError
from hlat.distributed.state_shard import StateShard


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run with checkpoints of steps 5, 10 and 15."""
    shard = StateShard("weights/w", (3,), (0,), (3,), torch.ones(3))
    for step in (5, 10, 15):
        checkpoint_store.save_checkpoint(tmp_path / "run/checkpoints", step, [shard], {})
    return tmp_path / "run"


def damage(path: Path) -> None:
    content = bytearray((path / "rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(content)


def find_error(source: Path, step: int | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        find_checkpoint(source, step)
    return str(refused.value)


def test_the_source_may_be_a_run_its_checkpoints_or_a_checkpoint(run: Path) -> None:
    checkpoints = run / "checkpoints"
    assert find_checkpoint(run, None) == (checkpoints / "step_00000015", [])
    assert find_checkpoint(run, 5) == (checkpoints / "step_00000005", [])
    assert find_checkpoint(checkpoints, 10) == (checkpoints / "step_00000010", [])
    assert find_checkpoint(checkpoints / "step_00000010", None) == (
        checkpoints / "step_00000010",
        [],
    )
    moved = (checkpoints / "step_00000010").rename(run.parent / "mine")
    assert find_checkpoint(moved, None) == (moved, [])


def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_found(run: Path) -> None:
    damage(run / "checkpoints/step_00000015")
    path, refused = find_checkpoint(run, None)
    assert path.name == "step_00000010"
    assert len(refused) == 1
    assert refused[0].startswith("checkpoint step_00000015 is rejected: ")


def test_a_specified_damaged_checkpoint_is_rejected(run: Path) -> None:
    path = run / "checkpoints/step_00000015"
    damage(path)
    for source, step in ((run, 15), (path, None)):
        assert f"{path / 'rank_00000.safetensors'} differs from what was written" in find_error(
            source, step
        )


def test_no_valid_checkpoint(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        damage(path)
    assert find_error(run).splitlines()[-1] == f"{run} contains no valid checkpoint"


def test_unknown_names(run: Path) -> None:
    parent = run.parent
    assert find_error(parent / "rnu") == (
        f"{parent / 'rnu'} does not exist; specify a run directory, such as {run}"
    )
    assert (
        find_error(Path("/nowhere/at/all"))
        == "/nowhere/at/all does not exist; specify a run directory"
    )
    (parent / "file").write_text("")
    assert find_error(parent / "file") == f"{parent / 'file'} is a file; specify a run directory"
    (parent / "empty").mkdir()
    assert find_error(parent / "empty") == (
        f"{parent / 'empty'} contains no checkpoint; specify a run directory, such as "
        "runs/<run.name>, that has saved, or one of its checkpoints"
    )


def test_missing_steps(run: Path) -> None:
    assert find_error(run, 7) == f"step=7: {run} has no such checkpoint, only 5, 10, 15"
    path = run / "checkpoints/step_00000005"
    assert find_error(path, 5) == f"{path} is a checkpoint; step= selects from a run directory"
