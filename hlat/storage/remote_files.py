"""Listing and opening of data files in object stores through fsspec.

Drivers and their credentials are the user's. Their exceptions are raised as ConfigError with the
URL.
"""

import glob
from typing import Any

import fsspec

from hlat.config.config_errors import ConfigError
from hlat.storage.data_file import DataDirectory, DataFile

READ_AHEAD_BYTES = 16 << 20
"""Bytes of read-ahead. The latency of a request equals the transfer time of some megabytes."""

_VERSION_KEYS = (
    *("ETag", "etag", "blob_id", "md5Hash", "checksum", "crc32c", "generation", "mtime"),
    *("LastModified", "last_modified", "updated", "modified", "created"),
)
"""Keys of fsspec's file information that change with the contents, most reliable first."""


def list_files(config_key: str, url: str) -> DataDirectory | list[DataFile]:
    """List the files at a URL.

    Args:
        config_key: Configuration key of `url`, for error messages.
        url: URL of a file, a directory, or a glob.

    Returns:
        A directory, or the matching files, which may be none.

    Raises:
        ConfigError: If no driver opens the URL, or a request fails.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        return _list_matches(filesystem, path, url)
    except ImportError as error:
        raise ConfigError(
            f"{config_key}: reading {url} needs a package that is not installed ({error}); "
            "pip install it beside hlat"
        ) from error
    except Exception as error:  # drivers raise the exceptions of their client libraries
        raise build_unreadable_error(f"{config_key}: cannot list", url, error) from error


def build_unreadable_error(action: str, location: str, error: Exception) -> ConfigError:
    """Return the error for a failed request to a store."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return ConfigError(
        f"{action} {location} ({reason}); check the URL and the credentials that this machine has "
        "for it"
    )


def open_file(location: str) -> Any:
    """Open a file in a store for reading at any position; exceptions of the driver propagate."""
    filesystem, path = fsspec.core.url_to_fs(location)
    return filesystem.open(path, "rb", block_size=READ_AHEAD_BYTES)


def _list_matches(filesystem: Any, path: str, url: str) -> DataDirectory | list[DataFile]:
    if glob.has_magic(path):
        matches = filesystem.glob(path, detail=True).values()
        return [_build_data_file(filesystem, info) for info in matches if info["type"] == "file"]
    if filesystem.isdir(path):
        infos = [info for info in filesystem.ls(path, detail=True) if info["type"] == "file"]
        files = {file.name: file for file in (_build_data_file(filesystem, info) for info in infos)}
        return DataDirectory(url.rstrip("/"), files, lambda name: _read_file(files[name].location))
    return [_build_data_file(filesystem, filesystem.info(path))] if filesystem.exists(path) else []


def _read_file(location: str) -> bytes:
    try:
        with open_file(location) as file:
            return bytes(file.read())
    except Exception as error:  # drivers raise the exceptions of their client libraries
        raise build_unreadable_error("cannot read", location, error) from error


def _build_data_file(filesystem: Any, info: dict[str, Any]) -> DataFile:
    versions = (f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None)
    location = filesystem.unstrip_protocol(info["name"])
    return DataFile(location, int(info["size"]), next(versions, ""))
