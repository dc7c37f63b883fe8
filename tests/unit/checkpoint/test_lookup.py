"""A user names a run; the checkpoint that is meant is found, or the sentence says what is there."""

from pathlib import Path

import pytest
import torch

from hlat.checkpoint import store
from hlat.checkpoint.chunk import Chunk
from hlat.checkpoint.lookup import find
from hlat.config.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 5, 10 and 15."""
    chunk = Chunk("weights/w", (3,), (0,), (3,), torch.ones(3))
    for step in (5, 10, 15):
        store.save(tmp_path / "run/checkpoints", step, [chunk], {})
    return tmp_path / "run"


def damage(path: Path) -> None:
    content = bytearray((path / "rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(content)


def refusal(source: Path, step: int | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        find(source, step)
    return str(refused.value)


def test_a_run_its_checkpoints_and_a_checkpoint_can_be_named(run: Path) -> None:
    checkpoints = run / "checkpoints"
    assert find(run, None) == (checkpoints / "step_00000015", [])
    assert find(run, 5) == (checkpoints / "step_00000005", [])
    assert find(checkpoints, 10) == (checkpoints / "step_00000010", [])
    assert find(checkpoints / "step_00000010", None) == (checkpoints / "step_00000010", [])
    moved = (checkpoints / "step_00000010").rename(run.parent / "mine")
    assert find(moved, None) == (moved, [])


def test_a_damaged_newest_is_told_and_the_one_before_it_found(run: Path) -> None:
    damage(run / "checkpoints/step_00000015")
    path, refused = find(run, None)
    assert path.name == "step_00000010"
    assert len(refused) == 1
    assert refused[0].startswith("checkpoint step_00000015 is refused: ")


def test_a_damaged_one_that_was_named_is_refused(run: Path) -> None:
    path = run / "checkpoints/step_00000015"
    damage(path)
    for source, step in ((run, 15), (path, None)):
        assert f"{path / 'rank_00000.safetensors'} is not what was written" in refusal(source, step)


def test_all_damaged(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        damage(path)
    assert refusal(run).splitlines()[-1] == f"{run} holds no valid checkpoint"


def test_names_that_mean_nothing(run: Path) -> None:
    parent = run.parent
    assert refusal(parent / "rnu") == (
        f"{parent / 'rnu'} does not exist; name a run's folder, such as {run}"
    )
    assert refusal(Path("/nowhere/at/all")) == "/nowhere/at/all does not exist; name a run's folder"
    (parent / "file").write_text("")
    assert refusal(parent / "file") == f"{parent / 'file'} is a file; name a run's folder"
    (parent / "empty").mkdir()
    assert refusal(parent / "empty") == (
        f"{parent / 'empty'} holds no checkpoint; name a run's folder, such as runs/<run.name>, "
        "that has saved, or one of its checkpoints"
    )


def test_steps_that_are_not_there(run: Path) -> None:
    assert refusal(run, 7) == f"--step=7: {run} has no such checkpoint, only 5, 10, 15"
    path = run / "checkpoints/step_00000005"
    assert refusal(path, 5) == f"{path} is one checkpoint; --step chooses from a run's folder"
