"""Where checkpoints lie, and how one comes to be there, goes, and gets another name.

On a disk a checkpoint is written under another name and appears by a rename. An object store has
none: there the files come under their final names and the marker last, and a folder without marker
is a save that was not completed, which nobody reads and the next save or prune removes.
"""

import os
import re
import shutil
from pathlib import Path

from hlat.checkpoint import durable
from hlat.checkpoint.manifest import MARKER
from hlat.checkpoint.remote import RemotePath, reason
from hlat.config.errors import ConfigError

Place = Path | RemotePath
"""A folder or file, here or elsewhere."""

TEMPORARY = ".tmp-"
"""Beginning of the names of folders that are being written or removed."""
ELSEWHERE = "checkpoints_are_in.txt"
"""File in a run's folder with the place of its checkpoints where that is another."""

_MARKER_BYTES = 64
_STEP = "step_"


def at(location: str, key: str | None = None) -> Place:
    """The place that a user names by a path or a URL.

    Args:
        location: What was typed.
        key: The configuration's key for it, for messages.

    Raises:
        ConfigError: It is a URL that nothing here can open, or one with a password.
    """
    if "://" not in location:
        return Path(location).expanduser()
    if re.match(r"[^/]*://[^/]*:[^/]*@", location):
        raise ConfigError(
            f"{key or 'the URL'} has a password in it, which records and messages would repeat; "
            "give it to the driver, in a file of ~/.config/fsspec or a variable"
        )
    from fsspec.core import url_to_fs  # where there are but paths it is not needed

    told = location if key is None else f"{key}={location}"
    try:
        filesystem, path = url_to_fs(location.rstrip("/"))
    except ImportError as error:
        raise ConfigError(
            f"{told} needs a package that is not installed ({error}); pip install it beside hlat"
        ) from error
    except Exception as error:  # every driver raises what its client library does
        raise unusable(told, error) from error
    return RemotePath(location.rstrip("/"), filesystem, path.rstrip("/"))


def unusable(told: str, error: Exception) -> ConfigError:
    """The error for a place that does not answer."""
    return ConfigError(
        f"{told} cannot be used ({reason(error)}); check it, and the credentials that this machine "
        "has for it"
    )


def home(run: Path, destination: str | None) -> Place:
    """The folder in which a run's folders of checkpoints lie.

    Args:
        run: The run's folder.
        destination: What checkpoint.destination says.

    Raises:
        ConfigError: It is a URL that nothing here can open.
    """
    if destination is None:
        return run
    return at(destination, "checkpoint.destination") / run.name


def recorded(run: Place) -> Place:
    """The same, as the run's folder tells it.

    Raises:
        ConfigError: It tells of a URL that nothing here can open.
        OSError: It cannot be read.
    """
    if not isinstance(run, Path) or not (run / ELSEWHERE).is_file():
        return run
    return at((run / ELSEWHERE).read_text().strip(), str(run / ELSEWHERE))


def record(run: Path, home: Place) -> None:
    """Leave word in a run's folder of where its checkpoints are."""
    path = run / ELSEWHERE
    if home == run:
        path.unlink(missing_ok=True)
        return
    where = home.absolute() if isinstance(home, Path) else home
    written = path.with_name(f"{TEMPORARY}{path.name}")
    written.write_text(f"{where}\n")
    written.replace(path)


def try_out(folder: Place) -> None:
    """Write a small file, read it and remove it.

    Raises:
        OSError: One of this cannot be done.
    """
    probe = folder / f"{TEMPORARY}probe-{os.getpid()}"
    if isinstance(folder, Path):
        durable.make_folder(folder)
    if isinstance(probe, Path):
        probe.unlink(missing_ok=True)
    durable.write(probe, [b"hlat"])
    if probe.read_bytes() != b"hlat":
        raise OSError(f"{probe} is not what was written there")
    probe.unlink()


def sizes(path: Place) -> dict[str, int | None]:
    """Bytes of each file of a folder by name; None for what is no plain file."""
    if isinstance(path, RemotePath):
        return path.sizes()
    return {
        entry.name: entry.stat().st_size if entry.is_file(follow_symlinks=False) else None
        for entry in os.scandir(path)
    }


def written(path: Place) -> float:
    """When a file was last changed, in seconds since 1970."""
    return path.modified() if isinstance(path, RemotePath) else path.stat().st_mtime


def steps(folder: Place) -> list[Place]:
    """Folders that bear the name of a step and are no incomplete save; there may be none.

    Raises:
        OSError: The folder cannot be listed.
    """
    if isinstance(folder, Path):
        return list(folder.glob(f"{_STEP}*"))
    return [path for path in _step_folders(folder) if is_taken(path)]


def leftovers(folder: Place) -> list[Place]:
    """What dead writes left behind; call it only while no save is under way."""
    if isinstance(folder, Path):
        return [*sorted(folder.glob(f"{TEMPORARY}*"))]
    return [path for path in _step_folders(folder) if not is_taken(path)]


def is_taken(path: Place) -> bool:
    """Whether a checkpoint, good or damaged, has this name.

    A marker that was cut short counts as none: not all that fsspec reaches writes a file at once.
    """
    if isinstance(path, Path):
        return path.exists()
    found = path.sizes()
    size = found.get(MARKER)
    return MARKER in found and (size is None or size >= _MARKER_BYTES)


def begin(target: Place) -> Place:
    """Make the folder that `publish` makes a checkpoint; returns it."""
    if isinstance(target, RemotePath):
        target.remove()
        return target
    durable.make_folder(target.parent)
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def publish(folder: Place, name: str) -> None:
    """Let a folder whose last file was the marker be a checkpoint; elsewhere it is one already."""
    if isinstance(folder, Path):
        durable.sync_folder(folder)
        durable.rename(folder, folder.with_name(name))


def discard(folder: Place) -> None:
    """Remove what is no checkpoint.

    Raises:
        OSError: It cannot be removed.
    """
    if isinstance(folder, RemotePath):
        _remove(folder)
    else:
        shutil.rmtree(folder)


def remove(path: Place) -> None:
    """Remove a checkpoint, which is none any more before its first file goes, or a leftover."""
    if isinstance(path, RemotePath):
        _remove(path)
        return
    if not path.name.startswith(TEMPORARY):
        durable.rename(path, path.with_name(f"{TEMPORARY}{path.name}"))
    shutil.rmtree(path.with_name(f"{TEMPORARY}{path.name.removeprefix(TEMPORARY)}"))


def move(path: Place, name: str) -> None:
    """Give a checkpoint another name in its folder; elsewhere by a copy of it."""
    if isinstance(path, Path):
        durable.rename(path, path.with_name(name))
        return
    files = [file for file, size in path.sizes().items() if size is not None]
    for file in sorted(files, key=lambda file: file == MARKER):
        (path / file).copy_to(path.with_name(name) / file)
    _remove(path)


def _step_folders(folder: RemotePath) -> list[Place]:
    return [folder / name for name in folder.sizes() if name.startswith(_STEP)]


def _remove(folder: RemotePath) -> None:
    """Remove a folder, its marker first."""
    (folder / MARKER).unlink()
    folder.remove()
