"""Neuron compile caches as libneuronxla stores them: complete modules and merges of caches.

    <cache>/neuronxcc-<version>/MODULE_<hash of the graph>+<hash of the flags>/
        model.hlo_module.pb  compile_flags.json    graph and compiler flags
        model.neff  model.done                     compiled program and empty marker
        model.log                                  error of a failed compilation
        model.hlo_module.pb.lock                   during compilation

A training process waits forever for the lock of a killed compiler and never compiles a failed graph
again. Merges therefore copy only complete modules without locks, atomically. docs/precompile.md
lists the sources.
"""

import fcntl
import shutil
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.storage import durable_files

_CACHE_URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
_DEFAULT_CACHE_DIR = "/var/tmp/neuron-compile-cache"  # noqa: S108 (of libneuronxla)
_SHARED_CACHE_NAME = ".compiled"
_LOCK_TIMEOUT_S, _POLL_INTERVAL_S = 600.0, 0.5
"""Timeout of a merge for modules under compilation, and the interval of its checks."""
_STAGING_DIR_NAME = ".merging"
"""Directory of a target with temporary files and locks of merges."""
_NUM_LOG_LINES = 5


@dataclass
class MergeResult:
    """Names of copied modules, of those complete before, and of those complete in no source."""

    added: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    incomplete: dict[str, str] = field(default_factory=dict)


def get_cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the cache directory of a process with this environment.

    Raises:
        ConfigError: If it is not a local directory, or a compiler flag sets another one.
    """
    if "--cache_dir" in environment.get("NEURON_CC_FLAGS", ""):
        raise ConfigError(
            f"NEURON_CC_FLAGS has --cache_dir, which overrides {_CACHE_URL_VARIABLE}; remove it "
            f"from compiler.cc_flags or the environment, and set {_CACHE_URL_VARIABLE}"
        )
    url = environment.get(_CACHE_URL_VARIABLE) or _DEFAULT_CACHE_DIR
    path = Path(url.removeprefix("file://"))
    if "://" in str(path) or not path.is_absolute():
        raise ConfigError(
            f"{_CACHE_URL_VARIABLE}={url} is not an absolute path; set it to a local directory"
        )
    return path


def get_shared_cache_dir(run_root: Path) -> Path:
    """Return the cache that all nodes and runs of a root share."""
    return run_root / _SHARED_CACHE_NAME


def list_modules(cache_dir: Path) -> list[Path]:
    """Return the directories of all modules, complete or not."""
    return sorted(path for path in cache_dir.glob("neuronxcc-*/MODULE_*") if path.is_dir())


def get_module_name(module: Path) -> str:
    """Return the unique name of a module: compiler version and both hashes."""
    return f"{module.parent.name}/{module.name}"


def is_module_complete(module: Path) -> bool:
    """Return True if training uses the module; the marker is written after the program."""
    neff = module / "model.neff"
    return (module / "model.done").is_file() and neff.is_file() and neff.stat().st_size > 0


def is_module_compiling(module: Path) -> bool:
    """Return True if a running process compiles the module.

    A lock file remains after its compiler was killed, so it counts only if a process has locked it,
    or a process of this host has the module in its command line, as neuronx-cc has. Compilers on
    other hosts are not detected.
    """
    locks = _list_locks(module)
    return any(map(_is_locked, locks)) or (bool(locks) and _is_compiling_on_host(module.name))


def _list_locks(module: Path) -> list[Path]:
    """Return the lock files of a module, which another process may replace in the meantime."""
    try:
        return [*module.glob("*.lock")]
    except FileNotFoundError:
        return []


def explain_incomplete_module(module: Path) -> str:
    """Return the reason why a module is incomplete, with the end of its log."""
    if is_module_compiling(module):
        return "is being compiled"
    log = module / "model.log"
    if log.is_file():
        lines = log.read_text(errors="replace").rstrip().splitlines()[-_NUM_LOG_LINES:]
        return "\n".join(["failed to compile:", *(f"    {line}" for line in lines)])
    if _list_locks(module):
        return "has the lock of a compiler that was killed"
    if not (module / "model.neff").is_file():
        return "was never compiled"
    return (
        "has no model.done" if (module / "model.neff").stat().st_size else "has an empty model.neff"
    )


def find_incomplete_modules(cache_dir: Path) -> dict[str, str]:
    """Return the reason for each incomplete module, by name."""
    return {
        get_module_name(module): explain_incomplete_module(module)
        for module in list_modules(cache_dir)
        if not is_module_complete(module)
    }


def remove_incomplete_modules(cache_dir: Path) -> list[str]:
    """Remove modules that are incomplete and not under compilation; return their names."""
    removed = []
    for module in list_modules(cache_dir):
        if not (is_module_complete(module) or is_module_compiling(module)):
            removed.append(get_module_name(module))
            with suppress(FileNotFoundError):  # another node removes it, too
                shutil.rmtree(module)
    return removed


def compute_merge_bytes(sources: Sequence[Path], target: Path) -> int:
    """Return the bytes that a merge would copy."""
    return sum(
        file.stat().st_size
        for name, copies in _group_by_module(sources).items()
        if not is_module_complete(target / name) and (module := _find_complete_copy(copies))
        for file in _list_module_files(module)
    )


def merge_caches(
    sources: Sequence[Path],
    target: Path,
    progress: Callable[[int], None] = lambda _: None,
    wait_s: float = _LOCK_TIMEOUT_S,
) -> MergeResult:
    """Copy every module that is complete in a source and not in the target.

    Any number of processes can merge at the same time and be killed at any time. A later merge
    copies what is missing. `progress` is called with the bytes of each copied block; `wait_s` is
    the timeout for modules that running processes compile.
    """
    copies, result = _group_by_module(sources), MergeResult()
    deadline = time.monotonic() + wait_s
    with _open_staging_dir(target) as staging_dir:
        pending = sorted(copies)
        while pending:
            is_last_attempt = time.monotonic() >= deadline
            pending = [
                name
                for name in pending
                if not _try_merge_module(name, copies[name], target, staging_dir, progress, result)
            ]
            if is_last_attempt:
                break
            if pending:
                time.sleep(_POLL_INTERVAL_S)
    result.incomplete |= dict.fromkeys(pending, f"is being compiled, also after {wait_s:g} s")
    return result


def _try_merge_module(
    name: str,
    copies: list[Path],
    target: Path,
    staging_dir: Path,
    progress: Callable[[int], None],
    result: MergeResult,
) -> bool:
    """Merge a module and return True, or return False if it is under compilation."""
    if is_module_complete(target / name):
        result.present.append(name)
        return True
    complete = _find_complete_copy(copies)
    if is_module_compiling(target / name) or (
        complete is None and any(map(is_module_compiling, copies))
    ):
        return False
    if complete is None:
        result.incomplete[name] = explain_incomplete_module(copies[0])
    elif _install_module(complete, target / name, staging_dir, progress):
        result.added.append(name)
    else:
        result.present.append(name)
    return True


def _install_module(
    module: Path, destination: Path, staging_dir: Path, progress: Callable[[int], None]
) -> bool:
    """Copy a complete module; return False if another process installed it first."""
    staged, replaced = staging_dir / module.name, staging_dir / "replaced"
    staged.mkdir()
    for file in _list_module_files(module):
        durable_files.write_file(staged / file.name, _read_blocks(file, progress))
    durable_files.fsync_directory(staged)
    destination.parent.mkdir(exist_ok=True)
    with (staging_dir.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not is_module_complete(destination)
        if is_first:
            with suppress(FileNotFoundError):
                destination.rename(replaced)
            staged.rename(destination)
    durable_files.fsync_directory(destination.parent)
    for directory in (staged, replaced):
        shutil.rmtree(directory, ignore_errors=True)
    return is_first


def _read_blocks(file: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    for block in durable_files.read_blocks(file):
        yield block
        progress(len(block))


def _list_module_files(module: Path) -> list[Path]:
    """Return all files but locks."""
    return [path for path in module.iterdir() if path.is_file() and path.suffix != ".lock"]


def _group_by_module(sources: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the directories of each module in all sources, by name."""
    copies = defaultdict(list)
    for source in sources:
        for module in list_modules(source):
            copies[get_module_name(module)].append(module)
    return copies


def _find_complete_copy(copies: list[Path]) -> Path | None:
    return next(filter(is_module_complete, copies), None)


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass  # just released
    return False


def _is_compiling_on_host(name: str) -> bool:
    """Return True if a command line of this host has the file that neuronx-cc reads."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended, or not readable
            if f"model.{name}.".encode() in process.read_bytes():
                return True
    return False


@contextmanager
def _open_staging_dir(target: Path) -> Iterator[Path]:
    """Yield a temporary directory in the target; remove those of killed merges of this host.

    Those of other hosts remain, since locks of some file systems are local to a host.
    """
    parent, host = target / _STAGING_DIR_NAME, socket.gethostname()
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / f"{host}.lock").open("a") as lock:
        with suppress(BlockingIOError):  # another merge of this host is running
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for stale in parent.glob(f"{host}+*"):
                shutil.rmtree(stale)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=f"{host}+", dir=parent) as directory:
            yield Path(directory)
