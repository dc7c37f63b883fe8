"""What disks, file systems and people do to the files of a checkpoint."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

PAGE_BYTES = 4096

Damage = Callable[[Path, Path, random.Random], None]
"""Harms a checkpoint, given one of its files, the checkpoint of another step, and chance."""


def files(folder: Path) -> list[Path]:
    """Every file of a checkpoint, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def any_file(folder: Path, chance: random.Random) -> Path:
    """One of the files, each as likely as another."""
    return chance.choice([path for path in files(folder) if path.stat().st_size])


def file_of_any_byte(folder: Path, chance: random.Random) -> Path:
    """One of the files, as likely as it is large: a disk does not know where files begin."""
    found = files(folder)
    return chance.choices(found, [path.stat().st_size for path in found])[0]


def flip_bit(file: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    position = chance.randrange(len(content) * 8)
    content[position // 8] ^= 1 << position % 8
    file.write_bytes(content)


def truncate(file: Path, other: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def zero_page(file: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    begin = chance.randrange(0, len(content), PAGE_BYTES)
    while not any(content[begin : begin + PAGE_BYTES]):  # moments of unused embeddings are zero
        begin = chance.randrange(0, len(content), PAGE_BYTES)
    content[begin : begin + PAGE_BYTES] = bytes(len(content[begin : begin + PAGE_BYTES]))
    file.write_bytes(content)


def delete(file: Path, other: Path, chance: random.Random) -> None:
    file.unlink()


def add(file: Path, other: Path, chance: random.Random) -> None:
    """A file beside the one that is given, under a name like it."""
    copy = file.with_name(f"{file.stem}_{chance.randrange(10**6)}{file.suffix}")
    copy.write_bytes(chance.randbytes(1000))


def replace(file: Path, other: Path, chance: random.Random) -> None:
    """The file of the other step in its place; of a name that only one step has, the nearest."""
    theirs = other / file.relative_to(other.parent / file.relative_to(other.parent).parts[0])
    if not theirs.exists():
        beside = files(theirs.parent if theirs.parent.is_dir() else other)
        theirs = min(beside, key=lambda path: abs(path.stat().st_size - file.stat().st_size))
    shutil.copy(theirs, file)


KINDS: dict[str, tuple[Damage, Callable[[Path, random.Random], Path]]] = {
    "one bit flipped": (flip_bit, file_of_any_byte),
    "truncated": (truncate, any_file),
    "4 kB page zeroed": (zero_page, file_of_any_byte),
    "file deleted": (delete, any_file),
    "extra file": (add, any_file),
    "file of another step": (replace, any_file),
}
"""What happens, and how the file is chosen that it happens to."""


def trials(num_flips: int, num_others: int) -> Iterator[tuple[str, int]]:
    """Each kind with its number of repetitions."""
    for kind in KINDS:
        yield kind, num_flips if kind == "one bit flipped" else num_others
