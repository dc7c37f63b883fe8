"""Disks that are full, broken, read-only or slow: does training go on, and is the next save good?

Usage: PYTHONPATH=. python tests/faults/disk.py --forks --output tests/faults/disk.json

Every call of a save that touches the disk fails once, each in a save of its own, and the save after
it works again. Then a real file system of some megabytes is filled and emptied at random moments.
Last, hlat starts with no room in TMPDIR, in /dev/shm and below run.root. The real file systems need
the right to mount.
"""

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.trials import (
    SUPERVISED,
    Keeper,
    Place,
    arguments,
    conclude,
    differing,
    say,
    somewhere,
)

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}
STALL_S = 1.0
ROOM_MB = 40
NO_ROOM = (
    ("TMPDIR", "supervised"),
    ("/dev/shm", "supervised"),
    ("/dev/shm", "data worker"),
    ("run.root", "one process"),
    ("run.root", "supervised"),
)


def schedule(steps: int, every: int) -> list[str]:
    """How long a run is, and how often it saves."""
    return [
        f"schedule.total_steps={steps}",
        "schedule.warmup_steps=2",
        f"checkpoint.every_steps={every}",
        "evaluation.every_steps=null",
    ]


def each_call(place: Place, name: str, number: int, seconds: float, calls: int) -> dict[str, Any]:
    """Let every call of a save fail once: of every other save, the next call."""
    words = schedule(4 * calls + 2, 2)
    whole, run = place.run(f"whole-{name}", *words), place.run(f"failing-{name}", *words)
    run.inject(disk=[number, seconds])
    codes = [one.finish(timeout_s=900) for one in (whole, run)]
    keeper = Keeper(run.folder / "checkpoints")
    keeper.check(keeper.committed())
    failed, saved = run.events("checkpoint_failed"), run.events("checkpoint")
    unmended = [row["step"] for row in failed if row["step"] + 2 not in steps_of(saved)]
    text = run.printed.read_text()
    result = {
        "exit_codes": codes,
        "saves": len(failed) + len(saved),
        "failed": len(failed),
        "reasons": sorted({row["reason"].split("]")[-1].strip()[:40] for row in failed}),
        "failed_and_the_next_one_too": unmended,
        "told_on_the_console": text.count("WARNING: no checkpoint at step"),
        "losses": differing(run.losses(), whole.losses()),
        "lost_or_damaged": keeper.problems,
        "left": sorted(keeper.unfinished()),
        "traceback": "Traceback" in text,
    }
    say(f"{name} at each call: {result}")
    return result


def steps_of(rows: list[dict[str, Any]]) -> set[int]:
    """Steps of some events."""
    return {row["step"] for row in rows}


@contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    """A file system of so many megabytes, in memory."""
    folder.mkdir()
    size = f"size={int(megabytes * 1024)}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, lot: random.Random | None = None) -> Path:
    """Take all its room, or all but a part of a checkpoint."""
    free = shutil.disk_usage(disk).free
    leave = 0 if lot is None else lot.choice([0, 0, lot.randrange(0, 9_000_000)])
    path = disk / "filled"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, free - leave))
    return path


def full_at_times(place: Place, trials: int, lot: random.Random) -> dict[str, Any]:
    """Fill the run's disk at random moments for random times, until enough saves have failed."""
    words = schedule(40 * trials, 3)
    whole = place.run("whole-full", *words)
    codes = [whole.finish(timeout_s=900)]
    with small_disk(place.folder / "disk", ROOM_MB) as disk:
        run = place.run("full", *words, f"run.root={disk}")
        run.folder = disk / "full"
        run.inject(step_s=0.02)
        keeper, fillings = Keeper(run.folder / "checkpoints"), 0
        run.start()
        while run.process.poll() is None:
            if not 0 < run.last_step() < 36 * trials:
                continue  # not at the beginning nor at the end, which need their saves
            time.sleep(lot.uniform(0, 1))
            before, path = keeper.committed(), None
            try:
                path = fill(disk, lot)
            except OSError:
                continue
            fillings += 1
            time.sleep(lot.uniform(0.2, 1.5))
            path.unlink()
            keeper.check(before)
        codes.append(run.wait())
        failed = run.events("checkpoint_failed")
        result = {
            "exit_codes": codes,
            "times_full": fillings,
            "saves_failed": len(failed),
            "saves": len(run.events("checkpoint")),
            "losses": differing(run.losses(), whole.losses()),
            "rows_missing_or_double": [row["step"] for row in run.rows("metrics.jsonl")]
            != [*range(1, 40 * trials + 1)],
            "lost_or_damaged": keeper.problems,
            "checkpoints_verified": keeper.verified,
            "left": sorted(keeper.unfinished()),
        }
    say(f"full at random times: {result}")
    return result


def no_room(place: Place, where: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Start a run where one of the folders that it uses is full."""
    disk = place.folder / "full-disk"
    disk.mkdir(exist_ok=True)
    target = {"TMPDIR": disk, "/dev/shm": "/dev/shm", "run.root": disk}[where]
    run = place.run(f"no-room-{len(list(place.folder.iterdir()))}", *schedule(6, 3), *overrides)
    run.forks = False
    words = [*run.words, *([f"run.root={disk}"] if where == "run.root" else [])]
    # In a mount namespace of its own, so that nobody else's /dev/shm is full
    script = (
        f'mount -t tmpfs -o size=64k tmpfs {target}; cat /dev/zero > {target}/filled; exec "$@"'
    )
    variables = {"TMPDIR": str(disk)} if where == "TMPDIR" else {"TMPDIR": str(place.tmp)}
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-m", "hlat.train"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *words],
            cwd=place.folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        return {"hangs": True}
    text = done.stderr.replace(str(place.folder), "...")
    told = [line for line in text.splitlines() if "write error" not in line]
    result = {
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "traceback": "Traceback" in done.stderr,
        "said": told[-3:],
    }
    say(f"no room in {where} {overrides}: {result}")
    return result


def main() -> None:
    parser = arguments("Disks that fail; --trials times 40 steps on one that is full at times.", 20)
    parser.add_argument("--calls", type=int, default=60, help="calls of a save that fail")
    asked = parser.parse_args()
    lot = random.Random(asked.seed)
    told: dict[str, Any] = {"forked": asked.forks}
    with somewhere(asked.folder, asked.forks) as place:
        faults = [*((name, number, 0.0) for name, number in ERRORS.items()), ("stall", 0, STALL_S)]
        told["each_call"] = {}
        for name, number, seconds in faults:
            calls = asked.calls if number else asked.calls // 6
            told["each_call"][name] = each_call(place, name, number, seconds, calls)
            conclude(told, asked.output)
        told["full_at_times"] = full_at_times(place, asked.trials, lot)
        kinds = {"one process": (), "supervised": SUPERVISED, "data worker": ("data.workers=1",)}
        told["no_room"] = {
            f"{where}, {kind}": no_room(place, where, kinds[kind]) for where, kind in NO_ROOM
        }
    conclude(told, asked.output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
