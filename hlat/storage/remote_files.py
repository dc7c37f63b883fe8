"""Listing and opening of data files in object stores through fsspec.

Drivers and their credentials are the user's. Their exceptions are raised as ConfigError with the
URL.
"""

import glob
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.storage.data_file import DataDirectory, DataFile
from hlat.storage.storage_path import build_unusable_error
from hlat.storage.storage_protocols import open_filesystem

READ_AHEAD_BYTES = 16 << 20
"""Bytes of read-ahead. The latency of a request equals the transfer time of some megabytes."""

_VERSION_KEYS = (
    *("ETag", "etag", "blob_id", "md5Hash", "checksum", "crc32c", "generation", "mtime"),
    *("LastModified", "last_modified", "updated", "modified", "created"),
)
"""Keys of fsspec's file information that change with the contents, most reliable first."""


def list_files(config_key: str, url: str) -> DataDirectory | list[DataFile]:
    """Return the directory at a URL, or the files that match it, which may be none.

    Raises:
        ConfigError: If no driver opens the URL, or a request fails; it names `config_key`.
    """
    try:
        filesystem, path = open_filesystem(url)
        return _list_matches(filesystem, path, url)
    except ConfigError as error:
        raise ConfigError(f"{config_key}: {error}") from error
    except Exception as error:  # drivers raise the exceptions of their client libraries
        raise build_unusable_error(f"{config_key}: {url}", error) from error


def open_file(location: str) -> Any:
    """Open a file in a store for reading at any position; exceptions of the driver propagate."""
    filesystem, path = open_filesystem(location)
    return filesystem.open(path, "rb", block_size=READ_AHEAD_BYTES)


def _list_matches(filesystem: Any, path: str, url: str) -> DataDirectory | list[DataFile]:
    if glob.has_magic(path):
        matches = filesystem.glob(path, detail=True).values()
        return [build_data_file(filesystem, info) for info in matches if info["type"] == "file"]
    if filesystem.isdir(path):
        infos = [info for info in filesystem.ls(path, detail=True) if info["type"] == "file"]
        files = {file.name: file for file in (build_data_file(filesystem, info) for info in infos)}
        return DataDirectory(url.rstrip("/"), files, lambda name: _read_file(files[name].location))
    return [build_data_file(filesystem, filesystem.info(path))] if filesystem.exists(path) else []


def _read_file(location: str) -> bytes:
    try:
        with open_file(location) as file:
            return bytes(file.read())
    except Exception as error:  # drivers raise the exceptions of their client libraries
        raise build_unusable_error(location, error) from error


def build_data_file(filesystem: Any, info: dict[str, Any]) -> DataFile:
    """Return the data file that fsspec's file information describes."""
    versions = (str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None)
    location = filesystem.unstrip_protocol(info["name"])
    return DataFile(location, int(info["size"]), next(versions, ""))
