"""A power failure at any step of a save preserves the old or the new checkpoint.

A killed process loses no written data. A power failure can lose all data that is not flushed: bytes
of files, names in directories and renames, in any combination.
"""

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.storage import durable_files
from tests.contract.test_checkpoint_store import (
    Killed,
    assert_contains,
    iterate_failures,
    save_state,
)
from tests.support.newest_checkpoint import find_newest_valid

LOST = [("bytes",), ("names",), ("bytes", "names")]


class Disk:
    """Context that tracks which writes below a directory are flushed, and loses the others."""

    def __init__(self, folder: Path, lost: tuple[str, ...], flushes: bool = True) -> None:
        self._folder, self._lost, self._flushes = folder, lost, flushes
        self._safe = {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
        self._names: list[tuple[Path, Path | None]] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        real_mkdir, real_replace, real_sync = os.mkdir, os.replace, os.fsync
        opened: Callable[..., Any] = getattr(durable_files, "open", builtins.open)

        def open_(path: Path, mode: str) -> Any:
            file = opened(path, mode)
            if "x" in mode:
                self._names.append((Path(path), None))
            return file

        def mkdir(path: Any, *arguments: Any) -> None:
            real_mkdir(path, *arguments)
            self._names.append((Path(path), None))

        def replace(source: Any, target: Any) -> None:
            real_replace(source, target)
            self._moved(source, target)
            self._names.append((Path(target), Path(source)))

        def sync(descriptor: int) -> None:
            real_sync(descriptor)
            if not self._flushes:
                return
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self._safe.add(path.stat().st_ino)
            if path.is_dir():
                self._names = [(name, was) for name, was in self._names if name.parent != path]

        self._patch.setattr(os, "mkdir", mkdir)
        self._patch.setattr(os, "replace", replace)
        self._patch.setattr(os, "fsync", sync)
        self._patch.setattr(durable_files, "open", open_, raising=False)

    def __exit__(self, *_: object) -> None:
        """Lose what was not flushed."""
        self._patch.undo()
        if "bytes" in self._lost:
            for path in self._folder.rglob("*"):
                if path.is_file() and path.stat().st_ino not in self._safe:
                    os.truncate(path, path.stat().st_size // 2)
        while "names" in self._lost and self._names:
            name, was = self._names.pop()
            name.rename(was or self._folder.with_name(f"lost_{name.name}_{id(self)}"))
            if was:
                self._moved(name, was)

    def _moved(self, source: Any, target: Any) -> None:
        """Update recorded names below a renamed directory."""
        self._names = [
            (Path(target) / name.relative_to(source) if name.is_relative_to(source) else name, was)
            for name, was in self._names
        ]


def save_with_power_failure(lost: tuple[str, ...], flushes: bool = True) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        with Disk(folder, lost, flushes):
            save_state(folder, 2)

    return save


@pytest.mark.parametrize("lost", LOST, ids="+".join)
def test_the_old_or_the_new_checkpoint_is_preserved(tmp_path: Path, lost: tuple[str, ...]) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    newest = []
    for folder in iterate_failures(save_with_power_failure(lost), start, Killed()):
        path, refused = find_newest_valid(folder)
        assert path is not None
        assert refused == []
        newest.append(int(path.name[-1]))
        assert_contains(path, newest[-1])
        save_state(folder, 3)
        assert_contains(folder / "step_00000003", 3)
    assert newest[0] == 1
    assert newest[-1] == 2, "a save that has returned survives"


@pytest.mark.parametrize("lost", LOST, ids="+".join)
def test_without_flushes_the_new_checkpoint_is_lost(tmp_path: Path, lost: tuple[str, ...]) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    save = save_with_power_failure(lost, flushes=False)
    *_, complete = iterate_failures(save, start, Killed())
    path, _ = find_newest_valid(complete)
    assert path is not None
    assert path.name == "step_00000001", "the save returned, and what it wrote is gone"
