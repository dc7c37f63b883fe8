"""Damage to the files of a checkpoint, as by disks, file systems and users."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

PAGE_BYTES = 4096

Damage = Callable[[Path, Path, random.Random], None]
"""Damages a file of a checkpoint, given the file, the checkpoint of another step, and an RNG."""


def files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def any_file(folder: Path, chance: random.Random) -> Path:
    """Sample a file uniformly."""
    return chance.choice([path for path in files(folder) if path.stat().st_size])


def file_of_any_byte(folder: Path, chance: random.Random) -> Path:
    """Sample a file with probability proportional to its size."""
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
    """Add a file with a similar name to the directory of `file`."""
    copy = file.with_name(f"{file.stem}_{chance.randrange(10**6)}{file.suffix}")
    copy.write_bytes(chance.randbytes(1000))


def replace(file: Path, other: Path, chance: random.Random) -> None:
    """Replace `file` by that of the other step, or by one of the nearest size if it has none."""
    source = other / file.relative_to(other.parent / file.relative_to(other.parent).parts[0])
    if not source.exists():
        candidates = files(source.parent if source.parent.is_dir() else other)
        source = min(candidates, key=lambda path: abs(path.stat().st_size - file.stat().st_size))
    shutil.copy(source, file)


KINDS: dict[str, tuple[Damage, Callable[[Path, random.Random], Path]]] = {
    "one bit flipped": (flip_bit, file_of_any_byte),
    "truncated": (truncate, any_file),
    "4 kB page zeroed": (zero_page, file_of_any_byte),
    "file deleted": (delete, any_file),
    "extra file": (add, any_file),
    "file of another step": (replace, any_file),
}
"""Damage, and the function that samples the file."""


def trials(num_flips: int, num_others: int) -> Iterator[tuple[str, int]]:
    """Yield each damage with its number of trials."""
    for fault in KINDS:
        yield fault, num_flips if fault == "one bit flipped" else num_others
