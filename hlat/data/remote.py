"""Files in object stores and elsewhere, listed and opened through fsspec.

A cluster's corpus often lies in a bucket. Whatever fsspec has a driver for will do; drivers and
their credentials are the user's, and what they raise is told with the URL that it belongs to.
"""

import glob
from typing import Any

import fsspec
import pyarrow as pa

from hlat.config.errors import ConfigError
from hlat.data.data_file import DataFile, Folder

BLOCK_BYTES = 16 << 20
"""Read ahead, in bytes: a request to a store takes as long as some megabytes."""

_VERSIONS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "checksum",
    "crc32c",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)
"""What the drivers call that which changes with a file's content, the surest first."""


def list_files(key: str, url: str) -> Folder | list[DataFile]:
    """List what lies at a URL.

    Args:
        key: Config key that names the URL, for messages.
        url: A file, a folder, or a glob.

    Returns:
        A folder, or the files that match: none if none do.

    Raises:
        ConfigError: If there is no driver for the URL, or the store does not answer.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        return _list(filesystem, path, url)
    except ImportError as error:
        raise ConfigError(
            f"{key}: reading {url} needs a package that is not installed ({error}); "
            "pip install it beside hlat"
        ) from error
    except Exception as error:  # every driver raises what its client library does
        raise unreadable(f"{key}: cannot list", url, error) from error


def unreadable(what: str, location: str, error: Exception) -> ConfigError:
    """The error for a store that does not give what it was asked for."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return ConfigError(
        f"{what} {location} ({reason}); check the URL and the credentials that this machine has "
        "for it"
    )


def open_file(location: str) -> pa.NativeFile:
    """Open a file of a store for reading at any position.

    Raises:
        Exception: Whatever its driver raises.
    """
    filesystem, path = fsspec.core.url_to_fs(location)
    return pa.PythonFile(filesystem.open(path, "rb", block_size=BLOCK_BYTES), mode="r")


def _list(filesystem: Any, path: str, url: str) -> Folder | list[DataFile]:
    if glob.has_magic(path):
        matches = filesystem.glob(path, detail=True).values()
        return [_file(filesystem, info) for info in matches if info["type"] == "file"]
    if filesystem.isdir(path):
        infos = [info for info in filesystem.ls(path, detail=True) if info["type"] == "file"]
        files = {file.name: file for file in (_file(filesystem, info) for info in infos)}
        return Folder(url.rstrip("/"), files, lambda name: _read(files[name].location))
    return [_file(filesystem, filesystem.info(path))] if filesystem.exists(path) else []


def _read(location: str) -> bytes:
    try:
        with open_file(location) as file:
            return bytes(file.read())
    except Exception as error:  # every driver raises what its client library does
        raise unreadable("cannot read", location, error) from error


def _file(filesystem: Any, info: dict[str, Any]) -> DataFile:
    known = (f"{name}={info[name]}" for name in _VERSIONS if info.get(name) is not None)
    location = filesystem.unstrip_protocol(info["name"])
    return DataFile(location, int(info["size"]), next(known, ""))
