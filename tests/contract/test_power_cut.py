"""A power cut at any step of a save leaves the old or the new checkpoint, whatever was not flushed.

A kill leaves to the disk all that was written. A power cut takes what no flush has reached: bytes
of files, names in folders and renames, in any combination.
"""

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.checkpoint.retention import find_newest_valid
from hlat.storage import durable_files
from tests.contract.test_checkpoint_store import Killed, assert_holds, every_failure, save_state

LOST = [("bytes",), ("names",), ("bytes", "names")]


class Disk:
    """What has reached the disk under a folder, of what is done while this is the context."""

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
        """Cut the power."""
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
        """Follow what lies in a folder that was renamed."""
        self._names = [
            (Path(target) / name.relative_to(source) if name.is_relative_to(source) else name, was)
            for name, was in self._names
        ]


def save_until_the_power_is_cut(
    lost: tuple[str, ...], flushes: bool = True
) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        with Disk(folder, lost, flushes):
            save_state(folder, 2)

    return save


@pytest.mark.parametrize("lost", LOST, ids="+".join)
def test_it_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, lost: tuple[str, ...]) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    newest = []
    for folder in every_failure(save_until_the_power_is_cut(lost), start, Killed()):
        path, refused = find_newest_valid(folder)
        assert path is not None
        assert refused == []
        newest.append(int(path.name[-1]))
        assert_holds(path, newest[-1])
        save_state(folder, 3)
        assert_holds(folder / "step_00000003", 3)
    assert newest[0] == 1
    assert newest[-1] == 2, "a save that has returned survives"


@pytest.mark.parametrize("lost", LOST, ids="+".join)
def test_without_flushes_it_would_not(tmp_path: Path, lost: tuple[str, ...]) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    save = save_until_the_power_is_cut(lost, flushes=False)
    *_, whole = every_failure(save, start, Killed())
    path, _ = find_newest_valid(whole)
    assert path is not None
    assert path.name == "step_00000001", "the save returned, and what it wrote is gone"
