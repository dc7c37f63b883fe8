"""Saves on a full disk, which remove the oldest checkpoint that no rollback needs."""

import errno
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpointer import Checkpointer
from hlat.checkpoint.training_state import TrainingState
from hlat.config.resolve import resolve_config
from hlat.distributed.object_group import SingleRankGroup
from hlat.distributed.state_shard import StateShard

CHUNKS = [StateShard("weights/w", (3,), (0,), (3,), torch.ones(3))]


@pytest.fixture
def write(compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the checkpoint of a step to a disk with space for three."""
    base = ["checkpoint.asynchronous=false", "checkpoint.keep_last=2", "checkpoint.every_steps=10"]
    save_checkpoint = checkpoint_store.save_checkpoint

    def save_to_small_disk(directory: Path, *arguments: object) -> Path:
        if len(names(tmp_path)) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save_checkpoint(directory, *arguments)

    monkeypatch.setattr(checkpoint_store, "save_checkpoint", save_to_small_disk)
    parallel_state = SimpleNamespace(background_group=SingleRankGroup())

    def write(step: int, first_bad_step: int | None, *more: str):
        config = resolve_config(compose(*base, *more))
        engine = SimpleNamespace(parallel_state=parallel_state)
        checkpointer = Checkpointer(config, tmp_path, engine, Mock(), Mock(), Mock())
        state = TrainingState(step, step * 1000).to_json()
        return checkpointer._write_checkpoint(step, CHUNKS, state, first_bad_step)

    return write


def names(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*"))


def test_prune_without_bad_steps(write, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        assert write(step, None).warning == ""
    assert names(tmp_path) == [30, 40]


def test_a_full_disk_removes_checkpoints_but_the_newest_before_the_bad_steps(
    write, tmp_path: Path
) -> None:
    write(10, None), write(20, None)
    remaining = []
    for step in (30, 40, 50, 60):
        result = write(step, first_bad_step=25)
        assert result.path is not None
        remaining.append(names(tmp_path))
    assert remaining == [[10, 20, 30], [20, 30, 40], [20, 40, 50], [20, 50, 60]]
    assert result.warning == "the disk was full, so step_00000040 was removed"


def test_the_save_fails_if_every_checkpoint_is_needed(write, tmp_path: Path) -> None:
    every = "checkpoint.keep_every_steps=10"
    for step in (10, 20, 30):
        write(step, 25, every)
    result = write(40, 25, every)
    assert (result.path, result.problem) == (None, "[Errno 28] No space left on device")
    assert names(tmp_path) == [10, 20, 30]


def test_no_checkpoint_is_removed_without_a_valid_one(write, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(step, first_bad_step=25)
        (tmp_path / f"checkpoints/step_000000{step}/COMMITTED").write_text("")
    assert write(40, first_bad_step=25).path is None
    assert names(tmp_path) == [10, 20, 30]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 1.0),
        (["optimizer.ema_decay=0.9"], 1.0),
        (["optimizer=schedule_free", "schedule=constant"], 3.0),
    ],
)
def test_a_milestone_has_the_weights_that_are_evaluated(
    compose, tmp_path: Path, overrides: list[str], expected: float
) -> None:
    engine = SimpleNamespace(parallel_state=SimpleNamespace(background_group=SingleRankGroup()))
    config = resolve_config(compose("checkpoint.asynchronous=false", *overrides))
    checkpointer = Checkpointer(config, tmp_path, engine, Mock(), Mock(), Mock())
    keys = ("weights", "z", "x", "ema")
    shards = [
        StateShard(f"{key}/w", (3,), (0,), (3,), torch.full((3,), float(value)))
        for value, key in enumerate(keys, 1)
    ]
    (shard,) = checkpointer._select_weights(shards)
    assert (shard.name, shard.tensor.tolist()) == ("weights/w", [expected] * 3)
