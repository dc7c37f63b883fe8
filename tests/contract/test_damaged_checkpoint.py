"""A damaged checkpoint of two processes is never loaded, and the previous one is."""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint import checkpoint_lookup
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_store import (
    load_checkpoint,
    load_state_json,
    save_checkpoint,
    verify_checkpoint,
)
from hlat.distributed.state_shard import StateShard
from tests.support.newest_checkpoint import find_newest_valid

FILES = [
    "COMMITTED",
    "manifest.json",
    "rank_00000.safetensors",
    "rank_00001.safetensors",
    "state.json",
]
SHAPE = (40, 24)


class Pair:
    """Two threads in place of the processes of a run."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.values: list[Any] = [None, None]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Member:
    """Process group of one of the two threads."""

    def __init__(self, pair: Pair, rank: int) -> None:
        self.rank, self.size, self.is_rank0 = rank, 2, rank == 0
        self._pair, self._rank = pair, rank

    def broadcast(self, message: bytes | None) -> bytes:
        received: bytes = self._pair.exchange(self._rank, message)[0]
        return received

    def reduce_object(self, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        values = self._pair.exchange(self._rank, value)
        return merge(values) if self.is_rank0 else None

    def any(self, flag: bool) -> bool:
        return any(self._pair.exchange(self._rank, flag))


def make_state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"{kind}/w": torch.randn(SHAPE, generator=generator) for kind in ("weights", "exp_avg")}


def rows_of(state: dict[str, torch.Tensor], rank: int) -> Iterator[StateShard]:
    """Yield the half of every tensor that a rank saves."""
    half = SHAPE[0] // 2
    for name, tensor in state.items():
        part = tensor[rank * half : (rank + 1) * half]
        yield StateShard(name, SHAPE, (rank * half, 0), (half, SHAPE[1]), part)


def save_in_two(folder: Path, step: int) -> Path:
    pair, state = Pair(), make_state(step)
    threads = [
        threading.Thread(
            target=save_checkpoint,
            args=(folder, step, list(rows_of(state, rank)), {"step": step}),
            kwargs={"process_group": Member(pair, rank)},
        )
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return folder / f"step_{step:08}"


class CheckpointPair:
    """Two checkpoints, of which the newer one can be restored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.older = save_in_two(folder, 1)
        self.newer = save_in_two(folder, 2)
        self._kept = folder.with_name("kept")
        shutil.copytree(self.newer, self._kept)

    def renew(self) -> Path:
        shutil.rmtree(self.newer)
        shutil.copytree(self._kept, self.newer)
        return self.newer

    def assert_rejected(self) -> None:
        """Check that the newer one is rejected but not removed, and the older one found."""
        with pytest.raises(CorruptCheckpointError, match="step_00000002"):
            verify_checkpoint(self.newer)
        found, (reason,) = find_newest_valid(self.folder)
        assert found == self.older
        assert "step_00000002 is rejected: " in reason
        assert checkpoint_lookup.find_checkpoint(self.folder, None) == (self.older, [reason])
        assert self.newer.is_dir()

    def assert_older_is_valid(self) -> None:
        found = {name: torch.zeros(SHAPE) for name in make_state(1)}
        load_checkpoint(self.older, [shard for rank in (0, 1) for shard in rows_of(found, rank)])
        assert all(torch.equal(found[name], tensor) for name, tensor in make_state(1).items())
        assert load_state_json(self.older) == {"step": 1}


@pytest.fixture
def pristine(tmp_path: Path) -> CheckpointPair:
    made = CheckpointPair(tmp_path / "checkpoints")
    assert sorted(path.name for path in made.newer.iterdir()) == FILES
    assert find_newest_valid(made.folder) == (made.newer, [])
    return made


@pytest.mark.slow
def test_a_hundred_flipped_bits(pristine: CheckpointPair) -> None:
    chance = random.Random(0)
    sizes = [(pristine.newer / name).stat().st_size for name in FILES]
    hit = set()
    for _ in range(100):
        (name,) = chance.choices(FILES, sizes)
        file = pristine.renew() / name
        content = bytearray(file.read_bytes())
        position = chance.randrange(8 * len(content))
        content[position // 8] ^= 1 << position % 8
        file.write_bytes(content)
        pristine.assert_rejected()
        hit.add(name)
    assert {"rank_00000.safetensors", "rank_00001.safetensors", "manifest.json"} <= hit
    pristine.assert_older_is_valid()


def swap(folder: Path, name: str) -> None:
    """Exchange a file with the next one: each is intact, and in the wrong place."""
    other = folder / FILES[(FILES.index(name) + 1) % len(FILES)]
    ours, theirs = (folder / name).read_bytes(), other.read_bytes()
    (folder / name).write_bytes(theirs)
    other.write_bytes(ours)


DAMAGES: dict[str, Callable[[Path, str], None]] = {
    "emptied": lambda folder, name: os.truncate(folder / name, 0),
    "a byte short": lambda folder, name: os.truncate(
        folder / name, (folder / name).stat().st_size - 1
    ),
    "half": lambda folder, name: os.truncate(folder / name, (folder / name).stat().st_size // 2),
    "deleted": lambda folder, name: (folder / name).unlink(),
    "swapped": swap,
    "of the older step": lambda folder, name: shutil.copy(
        folder.with_name("step_00000001") / name, folder / name
    ) and None,
    "a hard link's other name": lambda folder, name: os.link(folder / name, folder / f"{name}.1"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_every_file(pristine: CheckpointPair, damage: str) -> None:
    for name in FILES:
        DAMAGES[damage](pristine.renew(), name)
        pristine.assert_rejected()
    pristine.assert_older_is_valid()


def test_a_checkpoint_without_any_of_its_files(pristine: CheckpointPair) -> None:
    folder = pristine.renew()
    for name in FILES:
        (folder / name).unlink()
    pristine.assert_rejected()


def test_no_checkpoint_is_found_if_both_are_damaged(pristine: CheckpointPair) -> None:
    for path in (pristine.older, pristine.newer):
        os.truncate(path / "rank_00001.safetensors", 100)
    found, reasons = find_newest_valid(pristine.folder)
    assert found is None
    assert [reason.split()[1] for reason in reasons] == ["step_00000002", "step_00000001"]
