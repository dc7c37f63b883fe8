"""The run directory: creation, locking and metadata files.

Two processes in one directory would log every step twice and remove each other's checkpoints. The
directory is therefore locked until the process exits.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hlat.config import extensions
from hlat.config.config_errors import ConfigError
from hlat.config.redaction import redact_data
from hlat.config.run import RunConfig
from hlat.storage.durable_files import replace_file
from hlat.tracking.jsonl_log import open_events_log, open_metrics_log

_LOCK_FILE = ".lock"
EXTENSIONS_DIR = "extensions"
"""Copies of the extensions of a run; they are compared and never imported."""
EVALUATIONS_DIR = "evaluations"
"""Directory of scores in a run directory or a model directory."""
CAMPAIGN_FILE = "campaign.json"
"""File in the directory of a campaign, which contains the run directories of its stages."""
SUBMISSIONS_DIR, SUBMISSION_FILE = "submissions", "job.json"
"""Directory of the submissions to a scheduler, and file that each of them contains."""
_OTHER_WRITERS = (SUBMISSIONS_DIR, "wandb")
"""Directories that the launcher and W&B write, which create links of their own."""


def build_run_dir(run: RunConfig) -> Path:
    """Return `<run.root>/<run.name>`."""
    assert run.name is not None, "resolve names every run"
    return Path(run.root) / run.name


def find_latest_submission_path(run_dir: Path) -> Path | None:
    """Return the directory of the newest submission of a run or command; None: not submitted."""
    files = (run_dir / SUBMISSIONS_DIR).glob(f"*/{SUBMISSION_FILE}")
    numbered = [file.parent for file in files if file.parent.name.isdecimal()]
    return max(numbered, key=lambda path: int(path.name), default=None)


@contextmanager
def acquire_run_dir(run: RunConfig, is_rank0: bool = True) -> Iterator[Path]:
    """Create `<run.root>/<run.name>` and lock it for this process and its child processes.

    Ranks other than 0 only get the path. Raise ConfigError if the directory or a log is not
    writable, it contains symbolic links, or another process has locked it.
    """
    path = build_run_dir(run)
    if not is_rank0:
        yield path
        return
    with remove_if_refused(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = lock_run_dir(path)
        except BlockingIOError as error:
            raise ConfigError(
                f"run.name={run.name}: another process is training in {path}; wait until it has "
                "finished, or choose another run.name"
            ) from error
        except OSError as error:
            raise build_unwritable_error(path, error) from error
        with lock:
            for log in (open_metrics_log(path), open_events_log(path)):
                log.validate_access()
            yield path


@contextmanager
def remove_if_refused(run_dir: Path) -> Iterator[None]:
    """Remove a directory made in the context if a ConfigError ends the run before its first row.

    A directory that another process has locked remains: it may have been made for that process.
    """
    existed = run_dir.exists()
    try:
        yield
    except ConfigError:
        if not existed:
            with suppress(OSError), lock_run_dir(run_dir):
                has_checkpoints = any(run_dir.glob("checkpoints/step_*"))
                if not (has_checkpoints or open_metrics_log(run_dir).path.exists()):
                    shutil.rmtree(run_dir)
        raise


def lock_run_dir(run_dir: Path) -> IO[str]:
    """Lock a run directory until the returned file is closed.

    Raise BlockingIOError if another process has locked it, and ConfigError if a file in the
    directory is a symbolic link.
    """
    validate_no_symlinks(run_dir)
    lock = (run_dir / _LOCK_FILE).open("w")
    try:
        lock.write("locked by the training process of this run\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def is_in_use(run_dir: Path) -> bool:
    """Return True if a process has locked a directory, which need not be writable."""
    try:
        with (run_dir / _LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it was never locked
        return False
    return False


def is_locked_dir(run_dir: Path) -> bool:
    """Return True if a run directory still has the file that was locked."""
    return (run_dir / _LOCK_FILE).exists()


def validate_no_symlinks(run_dir: Path) -> None:
    """Raise ConfigError if a run directory from others redirects files to another directory."""
    for path in run_dir.iterdir():
        is_scanned = path.is_dir() and not path.is_symlink() and path.name not in _OTHER_WRITERS
        inner = path.iterdir() if is_scanned else ()
        for link in (path, *inner):
            if link.is_symlink():
                raise ConfigError(
                    f"{link} is a symbolic link to {link.readlink()}, and the run would write "
                    "there; remove it, or set checkpoint.destination to save checkpoints elsewhere"
                )


def write_run_metadata(
    run_dir: Path,
    config_yaml: str,
    extension_paths: Sequence[str],
    overrides: list[str],
    provenance: dict[str, Any],
) -> None:
    """Write config.yaml, overrides.yaml, provenance.json and the extensions of the latest attempt.

    Interpolations such as `${oc.env:...}` are not resolved, as their values may be secrets. Raise
    ConfigError if the files cannot be written.
    """
    files = {
        "config.yaml": config_yaml,
        # A list of JSON strings is valid YAML
        "overrides.yaml": "".join(f"- {json.dumps(override)}\n" for override in overrides),
        "provenance.json": json.dumps(redact_data(provenance), indent=2) + "\n",
    }
    try:
        for name, text in files.items():
            replace_file(run_dir / name, text.encode())
        extensions.save_copies(run_dir / EXTENSIONS_DIR, extension_paths)
    except OSError as error:
        raise build_unwritable_error(run_dir, error) from error


def build_unwritable_error(run_dir: Path, error: OSError) -> ConfigError:
    """Return the error for a run directory in which a file cannot be created."""
    is_refused = isinstance(error, PermissionError) and run_dir.is_dir()
    if is_refused and run_dir.stat().st_uid != os.geteuid():
        return ConfigError(
            f"run.name={run_dir.name}: {run_dir} belongs to another user ({error.strerror}); "
            "choose another run.name"
        )
    return ConfigError(
        f"run.root={run_dir.parent}: cannot write to {run_dir} ({error.strerror}); "
        "set run.root to a writable directory with free space"
    )
