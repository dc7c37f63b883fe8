"""Paths on local disks and in object stores, and the operations that both kinds share."""

import os
import re
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.storage import durable_files
from hlat.storage.remote_path import RemotePath, format_reason
from hlat.storage.storage_protocols import open_filesystem

StoragePath = Path | RemotePath
"""A local path or a path in an object store."""

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the names of directories that are being written or removed."""


def parse_storage_path(location: str, config_key: str | None = None) -> StoragePath:
    """Return the path for a local path or URL, the value of `config_key`.

    Raises:
        ConfigError: If no installed driver opens the URL, its protocol is not allowed, or the URL
            contains a password.
    """
    if "://" not in location and "::" not in location:
        return Path(location).expanduser()
    if re.match(r"[^/]*://[^/]*:[^/]*@", location):
        raise ConfigError(
            f"{config_key or 'the URL'} contains a password, which records and messages would "
            "repeat; pass it to the driver in a file of ~/.config/fsspec or a variable"
        )
    url = location.rstrip("/")
    try:
        filesystem, path = open_filesystem(url)
    except ConfigError as error:
        raise ConfigError(f"{config_key or 'URL'}: {error}") from error
    except Exception as error:  # drivers raise the exceptions of their client libraries
        name = location if config_key is None else f"{config_key}={location}"
        raise build_unusable_error(name, error) from error
    return RemotePath(url, filesystem, path.rstrip("/"))


def build_unusable_error(location: str, error: Exception) -> ConfigError:
    """Return the error for a location that cannot be accessed."""
    if isinstance(error, ImportError):
        return ConfigError(
            f"{location} needs a package that is not installed ({error}); pip install it beside "
            "hlat"
        )
    return ConfigError(
        f"{location} cannot be used ({format_reason(error)}); check it, and the credentials that "
        "this machine has for it"
    )


def validate_writable(directory: StoragePath) -> None:
    """Write, read and remove a small file in `directory`, creating the directory.

    Raises:
        OSError: If one of these operations fails.
    """
    probe = directory / f"{TEMPORARY_PREFIX}probe-{os.getpid()}"
    if isinstance(probe, Path):
        durable_files.make_directory(probe.parent)
        probe.unlink(missing_ok=True)
    durable_files.write_file(probe, [b"hlat"])
    if probe.read_bytes() != b"hlat":
        raise OSError(f"{probe} does not contain the bytes that were written")
    probe.unlink()


def list_sizes(path: StoragePath) -> dict[str, int | None]:
    """Return the size in bytes of each file in a directory by name; None for other entries."""
    if isinstance(path, RemotePath):
        return path.list_sizes()
    return {
        entry.name: entry.stat().st_size if entry.is_file(follow_symlinks=False) else None
        for entry in os.scandir(path)
    }


def get_modified_time(path: StoragePath) -> float:
    """Return the modification time of a file in seconds since 1970."""
    return path.modified() if isinstance(path, RemotePath) else path.stat().st_mtime
