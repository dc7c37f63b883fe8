"""Trials with disks that are full, broken, read-only or without power.

Mounts need root. A power failure is a forced shutdown of ext4 without a flush of its journal: what
no flush has reached is lost, as after the loss of power, except for reordered writes of a disk.
"""

import errno
import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults import trials

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}
CALLS, MAX_FILLINGS, MAX_POWER_FAILURES, MAX_MOUNTS = 12, 4, 4, 3
FULL_MB, EXT4_MB = 40, 96
_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/fs/ext4/ext4.h
_NO_LOG_FLUSH = 2
_NO_ROOM_TARGETS = ("TMPDIR", "/dev/shm", "run.root")


def build_overrides(steps: int, every_steps: int) -> tuple[str, ...]:
    """Return overrides of a run without evaluations, so only saves write to the disk."""
    return (
        *trials.build_run_overrides(steps, every_steps),
        "schedule.warmup_steps=2",
        "evaluation.every_steps=null",
    )


def fail_calls(name: str) -> trials.Trial:
    """Return the trial in which calls of saves fail with this error."""

    def fail_each_call(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
        """Raise an error in one call of every other save, a different one each time."""
        num_calls = workspace.limit(CALLS)
        overrides = (*build_overrides(4 * num_calls + 2, 2), *trials.LAYOUTS[layout])
        reference, _ = workspace.reference(*overrides)
        run = workspace.new_run(*overrides)
        run.inject(disk=[ERRORS[name], 0.0])
        run.start()
        try:
            problems = trials.finish_and_compare(run, reference)
        finally:
            run.kill_all()
        checker = trials.CheckpointChecker(run.checkpoints())
        checker.check(checker.committed())
        problems += checker.problems + [f"left {name}" for name in sorted(checker.unfinished())]
        failed = [row["step"] for row in run.events("checkpoint_failed")]
        saved = {row["step"] for row in run.events("checkpoint")}
        problems += [f"the save after step {s} failed too" for s in failed if s + 2 not in saved]
        if run.output().count("WARNING: no checkpoint at step") != len(failed):
            problems.append("a failed save was not reported")
        # On a full disk, the first save has no older checkpoint to remove; the others repeat
        num_failing = num_calls if name != "ENOSPC" else 1
        if len(failed) != num_failing:
            problems.append(f"{len(failed)} of {num_failing} saves failed")
        return ["; ".join(problems)] * num_calls

    return fail_each_call


@contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    """Mount a file system of this size in memory."""
    folder.mkdir()
    size = f"size={int(megabytes * 1024)}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill_at_times(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Fill the disk of a run at random moments for random times."""
    overrides = (*build_overrides(150, 3), *trials.LAYOUTS[layout])
    reference, _ = workspace.reference(*overrides)
    run, num_fillings = workspace.new_run(*overrides), 0
    checker = trials.CheckpointChecker(
        run.folder, keep_last=1
    )  # a save on a full disk removes the oldest
    with small_disk(workspace.folder / f"disk-{run.name}", FULL_MB) as disk:
        run.move_to(disk)
        checker.folder = run.checkpoints()
        run.inject(step_s=0.03)
        run.start()
        try:
            while num_fillings < workspace.limit(MAX_FILLINGS) and run.is_alive_after(
                rng.uniform(0, 1)
            ):
                if not 0 < run.last_step() < 130:  # the first and last save need free space
                    continue
                before = checker.committed()
                with filled(disk, rng):
                    run.is_alive_after(rng.uniform(0.2, 1))
                num_fillings += 1
                checker.check(before)
            problems = trials.finish_and_compare(run, reference)
        finally:
            run.kill_all()
        problems += checker.problems
    return ["; ".join(problems)] * num_fillings


@contextmanager
def filled(disk: Path, rng: random.Random) -> Iterator[None]:
    """Fill a disk, or all of it but a part of a checkpoint."""
    path, spared = disk / "filled", rng.choice([0, 0, rng.randrange(0, 9_000_000)])
    try:
        with path.open("wb") as file:
            free = max(4096, shutil.disk_usage(disk).free - spared)
            os.posix_fallocate(file.fileno(), 0, free)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # the run was faster, the disk is full
            raise
    yield
    path.unlink()


def start_without_room(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Start a supervised run where TMPDIR, /dev/shm or run.root is full."""
    return [_start_without_room(workspace, where, layout) for where in _NO_ROOM_TARGETS]


def _start_without_room(workspace: trials.Workspace, where: str, layout: str) -> str:
    overrides = (*build_overrides(6, 3), *trials.SUPERVISED, *trials.LAYOUTS[layout])
    run, disk = workspace.new_run(*overrides), workspace.folder / "no-room"
    disk.mkdir(exist_ok=True)
    target = "/dev/shm" if where == "/dev/shm" else str(disk)
    arguments = [*run.arguments, *([f"run.root={disk}"] if where == "run.root" else [])]
    # In a separate mount namespace, so /dev/shm is full for this run only
    script = (
        f'mount -t tmpfs -o size=64k tmpfs {target}; cat /dev/zero > {target}/filled; exec "$@"'
    )
    variables = {"TMPDIR": str(disk) if where == "TMPDIR" else str(workspace.tmp)}
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-m", "hlat.train"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=workspace.folder,
        env=os.environ | variables | {"PYTHONPATH": str(trials.REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    expected = 2 if where == "run.root" else 0
    if done.returncode != expected or "Traceback" in done.stderr:
        return f"full {where}: exit code {done.returncode}: {done.stderr[-500:]}"
    if where == "run.root" and f"run.root={disk}" not in done.stderr:
        return f"full {where}: {done.stderr[-500:]}"
    return ""


@contextmanager
def ext4(folder: Path) -> Iterator["Ext4"]:
    """Mount an ext4 file system in a file."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(EXT4_MB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    folder.mkdir()
    disk = Ext4(image, folder)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
        image.unlink()


class Ext4:
    """File system in the file `image`, mounted on `folder`."""

    def __init__(self, image: Path, folder: Path) -> None:
        self._image, self.folder = image, folder

    def mount(self) -> None:
        """Mount it, which replays the journal."""
        subprocess.run(["mount", "-o", "loop", self._image, self.folder], check=True)

    def unmount(self) -> None:
        """Unmount it; the processes that use it have ended."""
        call_until_success("umount", self.folder)

    def fail_power(self) -> None:
        """Stop all writes at once, without a flush of the journal."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)


def fail_power(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Simulate power failures of the disk at random moments; kill, mount and resume."""
    overrides = (*trials.build_run_overrides(60, 3), *trials.SUPERVISED, *trials.LAYOUTS[layout])
    reference, seconds = workspace.reference(*overrides)
    run, num_failures, problems = workspace.new_run(*overrides), 0, list[str]()
    with ext4(workspace.folder / f"ext4-{run.name}") as disk:
        run.move_to(disk.folder)
        run.start()
        try:
            while num_failures < workspace.limit(MAX_POWER_FAILURES) and run.is_alive_after(
                rng.uniform(0, seconds)
            ):
                saved = [row["step"] for row in run.events("checkpoint")]
                disk.fail_power()
                num_failures += 1
                family = trials.descendants(run.process.pid)
                run.kill_all()
                problems += [f"left process {pid}" for pid in trials.find_survivors(family)]
                disk.unmount()
                disk.mount()
                problems += _find_lost(run, saved)
                run.start()
            problems += trials.finish_and_compare(run, reference)
        finally:
            run.kill_all()
    return ["; ".join(problems)] * num_failures


def _find_lost(run: trials.Run, saved: list[int]) -> list[str]:
    """Return a problem if no checkpoint at or after the last logged save is valid."""
    checker = trials.CheckpointChecker(run.checkpoints())
    checker.check(committed := checker.committed())
    if saved and max(committed, default=0) < saved[-1]:
        checker.problems.append(f"step {saved[-1]} was saved, the disk has {committed}")
    return checker.problems


def make_read_only(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Make the run directory read-only at random moments for random times."""
    overrides = (*build_overrides(150, 3), *trials.LAYOUTS[layout])
    reference, _ = workspace.reference(*overrides)
    run, num_mounts = workspace.new_run(*overrides), 0
    run.inject(step_s=0.03)
    run.start()
    try:
        while num_mounts < workspace.limit(MAX_MOUNTS) and run.is_alive_after(rng.uniform(0, 1)):
            if not 0 < run.last_step() < 130:
                continue
            with read_only(run.folder):
                run.is_alive_after(rng.uniform(0.2, 1))
            num_mounts += 1
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    num_failed = len(run.events("checkpoint_failed"))
    if run.output().count("WARNING: no checkpoint at step") != num_failed:
        problems.append(f"{run.name}: a failed save was not reported")
    return ["; ".join(problems)] * num_mounts


def call_until_success(*command: str | Path) -> None:
    """Repeat a command, for at most 10 s, while a file is open or a thread of a process ends."""
    deadline = time.monotonic() + 10
    while subprocess.run(command, check=time.monotonic() > deadline).returncode:
        time.sleep(0.05)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Mount a directory read-only on itself; files that are open remain writable."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        call_until_success("mount", "-o", "remount,bind,ro", folder)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def find_mount_problem() -> str:
    """Return why this process cannot mount a file system; empty if it can."""
    return "mounts need root" if os.geteuid() else ""


def find_ext4_problem() -> str:
    """Return why this machine cannot shut down an ext4 file system; empty if it can."""
    if problem := find_mount_problem():
        return problem
    if shutil.which("mkfs.ext4") is None:
        return "mkfs.ext4 is not installed"
    with tempfile.TemporaryDirectory() as name:
        try:
            with ext4(Path(name) / "disk") as disk:
                disk.fail_power()
        except (OSError, subprocess.CalledProcessError) as error:
            return f"a loop device cannot be mounted or shut down ({error})"
    return ""
