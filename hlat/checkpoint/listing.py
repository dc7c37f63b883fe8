"""What checkpoints a run's folder holds, told without reading their tensors.

Whoever looks at a folder of terabytes wants an answer at once, so sizes and names are compared with
the manifest and nothing is hashed but the small files; `store.verify` reads the rest.
"""

import re
from contextlib import suppress
from dataclasses import dataclass

from hlat.checkpoint import lookup, places, store
from hlat.checkpoint.manifest import MARKER
from hlat.checkpoint.places import Place
from hlat.config.errors import ConfigError
from hlat.state import TrainingState

AVERAGES = "averages"
"""Folder that holds averages, always in the run's own."""

COMMITTED, INCOMPLETE, DAMAGED = "committed", "incomplete", "damaged"
_SET_ASIDE = re.compile(r"step_(\d{8,})_(damaged|diverged)_\d+")
"""Names of checkpoints that a run keeps, but never goes on from: the step, and why."""
_WRITTEN_FOR = re.compile(re.escape(store.TEMPORARY) + r"step_(\d{8,})")


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or what claims to be one or will become one.

    Attributes:
        path: Its folder.
        step: Optimizer steps; None where no name and no manifest tells.
        tokens: Tokens that the run had consumed; None if that is not known.
        written: When it was last changed, in seconds since 1970.
        num_bytes: Size of its files.
        kind: `full`, or `weights only` if no run can go on from it; None if that is not known.
        state: `committed`; `incomplete` if it has no marker, as while it is written; `damaged` if
            its files contradict its manifest; or the word of the name that it was set aside under.
        problem: Why it is not committed, where there is more to say.
    """

    path: Place
    step: int | None
    tokens: int | None
    written: float
    num_bytes: int
    kind: str | None
    state: str
    problem: str | None = None


def entries(run: Place) -> list[Entry]:
    """List a run's checkpoints: by place, then by step.

    Args:
        run: A run's folder, one of its folders of checkpoints, or a checkpoint.

    Raises:
        ConfigError: There is no such folder, or nothing in it.
    """
    home = lookup.home(run)
    if store.is_checkpoint(run):
        return [_entry(run)]
    folders = [home / "checkpoints", home / "milestones", run / AVERAGES]
    there = [folder for folder in folders if folder.is_dir()] or [run]
    found = [entry for folder in there for entry in _in_order(folder)]
    if not found:
        raise lookup.nothing_in(run)
    return found


def is_promised(path: Place) -> bool:
    """Whether a folder is no draft and was not set aside."""
    return not (path.name.startswith(store.TEMPORARY) or _SET_ASIDE.fullmatch(path.name))


def _is_listed(path: Place) -> bool:
    return path.is_dir() and (store.is_checkpoint(path) or not is_promised(path))


def _in_order(place: Place) -> list[Entry]:
    """What a folder holds; a run that trains there may remove any of it meanwhile."""
    found = []
    for path in filter(_is_listed, place.iterdir()):
        with suppress(FileNotFoundError):
            found.append(_entry(path))
    return sorted(found, key=lambda e: (-1 if e.step is None else e.step, e.path.name))


def _entry(path: Place) -> Entry:
    set_aside = _SET_ASIDE.fullmatch(path.name)
    named = set_aside or _WRITTEN_FOR.match(path.name)
    step = store.step_of(path) if named is None else int(named[1])
    sizes = {name: size for name, size in places.sizes(path).items() if size is not None}
    times = [places.written(path / name) for name in sizes]
    written = max(times) if times else places.written(path)
    size = sum(sizes.values())
    if path.name.startswith(store.TEMPORARY) or not (path / MARKER).exists():
        return Entry(path, step, None, written, size, None, INCOMPLETE)
    try:
        manifest = store.check_files(path)
        state = TrainingState.from_json(store.load_state(path))
    except ConfigError as error:
        return Entry(path, step, None, written, size, None, DAMAGED, str(error))
    weights = all(name.startswith("weights/") for name in manifest.tensors)
    kind = "weights only" if weights or state.weights_only else "full"
    known = set_aside[2] if set_aside else COMMITTED
    return Entry(path, manifest.step, state.tokens, written, size, kind, known)
