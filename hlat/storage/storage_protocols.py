"""Protocols of URLs that are opened through fsspec.

Some of fsspec's file systems read other URLs, execute code or start programs, such as `reference`
and `dask`, and `::` chains file systems. URLs in files of others, such as
`checkpoints_are_in.txt` and configurations, must not select them.
"""

import functools
import os
from typing import Any

from hlat.config.config_errors import ConfigError

PROTOCOLS = (
    *("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"),
    *("oss", "oci", "hf", "http", "https"),
)
"""Protocols that only read and write files."""
PROTOCOLS_ENV = "HLAT_STORAGE_PROTOCOLS"
"""Environment variable with further protocols, separated by commas."""


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL or local path, and the path within it.

    Exceptions of the driver propagate.

    Raises:
        ConfigError: The URL is chained, or its protocol is not in `PROTOCOLS`.
    """
    from fsspec.core import split_protocol, url_to_fs  # deferred: local paths do not need it

    allowed = [*PROTOCOLS, *filter(None, os.environ.get(PROTOCOLS_ENV, "").split(","))]
    if url.startswith("/"):  # never a chain, although names of files may contain ::
        return _get_local_filesystem(), url.rstrip("/") or "/"
    protocol = split_protocol(url)[0] or "file"
    if "::" in url:
        raise ConfigError(f"{url} is not allowed, since chained URLs (::) can execute code")
    if protocol not in allowed:
        raise ConfigError(
            f"{url}: {protocol} is not an allowed protocol; use {', '.join(allowed)}, or set "
            f"{PROTOCOLS_ENV}={protocol} in the environment if its driver executes no code"
        )
    filesystem, path = url_to_fs(url)
    return filesystem, path


@functools.cache
def _get_local_filesystem() -> Any:
    from fsspec.implementations.local import LocalFileSystem

    return LocalFileSystem()
