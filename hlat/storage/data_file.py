"""Location, size and version of data files, which identify cached results derived from them."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.storage.bounded_files import validate_size


@dataclass(frozen=True)
class DataFile:
    """File of a data source at the time of its listing.

    `location` is a path or URL; `version` is a modification time, checksum, or another value that
    changes with the contents.
    """

    location: str
    num_bytes: int
    version: str

    @classmethod
    def from_path(cls, path: Path) -> "DataFile":
        """Return the data file at a local path.

        Raises:
            OSError: If the file does not exist.
        """
        status = path.stat()
        return cls(str(path), status.st_size, str(status.st_mtime_ns))

    @property
    def name(self) -> str:
        """Last component of the location."""
        return self.location.rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        """True if the location is a URL."""
        return is_remote(self.location)

    @property
    def resolved_location(self) -> str:
        """Location with symbolic links resolved."""
        return self.location if self.is_remote else os.path.realpath(self.location)

    def compute_cache_key(self, column: str, format_version: int) -> str:
        """Return the name of the cache entry derived from a column of this file."""
        key = [format_version, self.resolved_location, self.num_bytes, self.version, column]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class DataDirectory:
    """Files directly in a local or remote directory."""

    location: str
    files: Mapping[str, DataFile]
    """Files by name."""
    read_file: Callable[[str], bytes]
    """Function that returns the contents of a file by name and raises ConfigError on failure."""

    def read_json(self, name: str) -> Any:
        """Return the contents of a JSON file; None if the file is missing or is not JSON.

        Raises:
            ConfigError: If the file cannot be read or is too large.
        """
        if name not in self.files:
            return None
        try:
            validate_size(name, self.files[name].num_bytes)
        except OSError as error:
            location = self.files[name].location
            raise ConfigError(f"{location} cannot be read ({error.strerror})") from error
        content = self.read_file(name)
        with suppress(RecursionError, ValueError):
            return json.loads(content)
        return None


def is_remote(location: str) -> bool:
    """Return True if a location is a URL."""
    return "://" in location
