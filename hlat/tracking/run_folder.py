"""The folder of a run: made, claimed for one process, and described.

Two processes in one folder would log every step twice and remove each other's checkpoints, so the
folder is locked; the lock ends with the process, however it ends.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hlat.config.errors import ConfigError
from hlat.config.run import Run

EVALUATIONS = "evaluations"
"""Where scores lie, in the folder of a run or of a model."""


@contextmanager
def claimed(run: Run, leads: bool = True) -> Iterator[Path]:
    """Make `<run.root>/<run.name>` and hold it for this process and those that it leads.

    Args:
        run: The run.
        leads: Whether this process is the first of the run's; the others just get the path.

    Raises:
        ConfigError: It cannot be made or written to, or another process holds it.
    """
    assert run.name is not None, "resolve names every run"
    path = Path(run.root) / run.name
    if not leads:
        yield path
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = hold(path)
    except BlockingIOError as error:
        raise ConfigError(
            f"run.name={run.name}: another process is training in {path}; wait until it has "
            "ended, or choose another run.name"
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    with lock:
        yield path


def hold(folder: Path) -> IO[str]:
    """Lock a run's folder for this process until the file that is returned is closed.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It cannot be written to.
    """
    lock = (folder / ".lock").open("w")
    try:
        lock.write("held by the process that trains here\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def describe(
    folder: Path, config_yaml: str, overrides: list[str], provenance: dict[str, Any]
) -> None:
    """Write config.yaml, overrides.yaml and provenance.json of the newest attempt.

    Interpolations stay as they were typed: what `${oc.env:...}` stands for may be a secret.

    Raises:
        ConfigError: The disk refuses them.
    """
    try:
        _replace(folder / "config.yaml", config_yaml)
        # A list of JSON strings is a YAML list, and needs no YAML library here
        _replace(folder / "overrides.yaml", "".join(f"- {json.dumps(o)}\n" for o in overrides))
        _replace(folder / "provenance.json", json.dumps(provenance, indent=2) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.root={folder.parent}: cannot write to {folder} ({error.strerror}); "
        "set run.root to a folder with room that you may write to"
    )


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f".{path.name}.tmp")
    written.write_text(text)
    written.replace(path)
