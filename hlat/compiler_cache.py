"""Folders of compiled graphs as libneuronxla keeps them: what is complete, and many made one.

    <cache>/neuronxcc-<version>/MODULE_<hash of the graph>+<hash of the flags>/
        model.hlo_module.pb  compile_flags.json    the graph, and how to compile it
        model.neff  model.done                     what came of it: program, and empty marker
        model.log                                  or why nothing did
        model.hlo_module.pb.lock                   while somebody compiles it

To a training process a lock that a killed compiler left means to wait for ever, and a graph that
failed once is never compiled again. So only complete modules travel, without their locks, and
each appears in its new place whole or not at all. docs/precompile.md has the sources.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hlat.config.errors import ConfigError

_LOCATION = "NEURON_COMPILE_CACHE_URL"
_DEFAULT_LOCATION = "/var/tmp/neuron-compile-cache"  # noqa: S108 (of libneuronxla)
_SHARED = ".compiled"
_WAIT_S, _SECONDS_BETWEEN_LOOKS = 600.0, 0.5
"""How long a merge waits for modules that somebody compiles, and how often it looks."""
_DRAFTS = ".merging"
"""Folder of a target in which merges write, and meet."""
_LOG_LINES = 5
_BLOCK_BYTES = 1 << 22


@dataclass
class Merged:
    """What a merge did, by the names of modules.

    Attributes:
        added: Copied.
        present: Complete in the target already.
        left: Complete nowhere, with the reason.
    """

    added: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def location(environment: Mapping[str, str]) -> Path:
    """The folder in which a process with this environment looks for compiled graphs.

    Raises:
        ConfigError: It is no folder of this machine, or a compiler flag names another one.
    """
    if "--cache_dir" in environment.get("NEURON_CC_FLAGS", ""):
        raise ConfigError(
            f"NEURON_CC_FLAGS has --cache_dir, which wins over {_LOCATION}; drop it from "
            f"compiler.cc_flags or the environment, and set {_LOCATION}"
        )
    url = environment.get(_LOCATION) or _DEFAULT_LOCATION
    path = Path(url.removeprefix("file://"))
    if "://" in str(path) or not path.is_absolute():
        raise ConfigError(f"{_LOCATION}={url} is no absolute path; set it to a folder of this node")
    return path


def shared(run_root: Path) -> Path:
    """The folder in which the nodes of all runs of a root share what they have compiled."""
    return run_root / _SHARED


def modules(cache: Path) -> list[Path]:
    """The folders of all modules, complete or not."""
    return sorted(path for path in cache.glob("neuronxcc-*/MODULE_*") if path.is_dir())


def name_of(module: Path) -> str:
    """What tells a module from all others: the compiler's version and its two hashes."""
    return f"{module.parent.name}/{module.name}"


def is_complete(module: Path) -> bool:
    """Whether training takes the module as it is; the marker is written after the program."""
    neff = module / "model.neff"
    return (module / "model.done").is_file() and neff.is_file() and neff.stat().st_size > 0


def is_held(module: Path) -> bool:
    """Whether a living process compiles the module.

    A lock is a file, which outlives a compiler that was killed. So it counts where a process has it
    locked, or one of this machine has the module in its command line, as neuronx-cc does. Compilers
    on other machines cannot be seen.
    """
    locks = [*module.glob("*.lock")]
    return any(map(_is_locked, locks)) or (bool(locks) and _is_compiled_here(module.name))


def trouble(module: Path) -> str:
    """Why a module is incomplete, with the end of its log where there is one."""
    if is_held(module):
        return "is being compiled"
    log = module / "model.log"
    if log.is_file():
        lines = log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        return "\n".join(["failed to compile:", *(f"    {line}" for line in lines)])
    if any(module.glob("*.lock")):
        return "was left locked by a compiler that is gone"
    if (module / "model.neff").is_file():
        empty = not (module / "model.neff").stat().st_size
        return "has an empty model.neff" if empty else "has no model.done"
    return "was never compiled"


def problems(cache: Path) -> dict[str, str]:
    """The incomplete modules by name, each with the reason."""
    return {name_of(path): trouble(path) for path in modules(cache) if not is_complete(path)}


def discard_incomplete(cache: Path) -> list[str]:
    """Remove what earlier attempts left unfinished, so that the next one compiles it anew.

    Returns:
        The names of the modules that are gone; those that a living process compiles stay.
    """
    gone = [path for path in modules(cache) if not (is_complete(path) or is_held(path))]
    for path in gone:
        with suppress(FileNotFoundError):  # another node clears the same folder
            shutil.rmtree(path)
    return [name_of(path) for path in gone]


def bytes_to_merge(sources: Sequence[Path], target: Path) -> int:
    """Bytes that a merge would copy now."""
    whole = [
        module
        for name, offers in _offers(sources).items()
        if not is_complete(target / name) and (module := _whole(offers)) is not None
    ]
    return sum(file.stat().st_size for module in whole for file in _files(module))


def merge(
    sources: Sequence[Path],
    target: Path,
    progress: Callable[[int], None] = lambda _: None,
    wait_s: float = _WAIT_S,
) -> Merged:
    """Bring every module that is complete in one of the sources into the target.

    Any number of processes may do this at once, and be killed at any moment: a module of the target
    that is complete stays, one that is not is replaced, and what was not done the next merge does.

    Args:
        sources: Caches, as of the nodes that compiled.
        target: The cache to complete; made if it is not there.
        progress: Hears of every further bytes copied.
        wait_s: Seconds to wait for modules that living processes compile.

    Raises:
        OSError: The target cannot be written.
    """
    offers, merged = _offers(sources), Merged()
    deadline = time.monotonic() + wait_s
    with _drafts(target) as drafts:
        waiting = sorted(offers)
        while waiting:
            late = time.monotonic() >= deadline
            waiting = [
                name
                for name in waiting
                if not _settled(name, offers[name], target, drafts, progress, merged)
            ]
            if late:
                break
            if waiting:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
    merged.left |= dict.fromkeys(waiting, f"is being compiled, also after {wait_s:g} s")
    return merged


def _settled(
    name: str,
    offers: list[Path],
    target: Path,
    drafts: Path,
    progress: Callable[[int], None],
    merged: Merged,
) -> bool:
    """Do what can be done for a module; returns whether nothing remains to be waited for."""
    if is_complete(target / name):
        merged.present.append(name)
        return True
    whole = _whole(offers)
    if is_held(target / name) or (whole is None and any(map(is_held, offers))):
        return False
    if whole is None:
        merged.left[name] = trouble(offers[0])
    elif _bring(whole, target / name, drafts, progress):
        merged.added.append(name)
    else:
        merged.present.append(name)
    return True


def _bring(module: Path, place: Path, drafts: Path, progress: Callable[[int], None]) -> bool:
    """Copy a complete module; returns False if another process was faster."""
    draft = drafts / module.name
    draft.mkdir()
    for file in _files(module):
        _copy(file, draft / file.name, progress)
    _flush(draft)
    place.parent.mkdir(exist_ok=True)
    with (drafts.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fastest = not is_complete(place)
        if fastest:
            with suppress(FileNotFoundError):
                place.rename(drafts / "replaced")
            draft.rename(place)
    _flush(place.parent)
    for rest in (draft, drafts / "replaced"):
        shutil.rmtree(rest, ignore_errors=True)
    return fastest


def _copy(source: Path, copy: Path, progress: Callable[[int], None]) -> None:
    """Copy a file onto the disk."""
    with source.open("rb") as reader, copy.open("xb") as writer:
        while block := reader.read(_BLOCK_BYTES):
            progress(writer.write(block))
        writer.flush()
        os.fsync(writer.fileno())


def _files(module: Path) -> list[Path]:
    """What travels of a module."""
    return [path for path in module.iterdir() if path.is_file() and path.suffix != ".lock"]


def _offers(sources: Sequence[Path]) -> dict[str, list[Path]]:
    """The folders of each module in all sources."""
    found = defaultdict(list)
    for module in (module for source in sources for module in modules(source)):
        found[name_of(module)].append(module)
    return found


def _whole(offers: list[Path]) -> Path | None:
    return next(filter(is_complete, offers), None)


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass  # released meanwhile
    return False


def _is_compiled_here(name: str) -> bool:
    """Whether a command line of this machine has the file that neuronx-cc gets of a module."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended, or is not ours to look at
            if f"model.{name}.".encode() in process.read_bytes():
                return True
    return False


@contextmanager
def _drafts(target: Path) -> Iterator[Path]:
    """A folder for drafts in the target; what killed merges of this host left there goes.

    That of other hosts stays: some file systems keep a host's locks to itself.
    """
    home, host = target / _DRAFTS, socket.gethostname()
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{host}.lock").open("a") as lock:
        with suppress(BlockingIOError):  # else another merge of this host is under way
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in home.glob(f"{host}+*"):
                shutil.rmtree(left)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=f"{host}+", dir=home) as made:
            yield Path(made)


def _flush(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
