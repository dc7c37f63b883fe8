"""What is known of a data file before it is opened, wherever it lies.

Location, size and version decide whether what was once worked out from a file still holds, so they
are taken when it is listed and go wherever the file goes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REMOTE = "://"


@dataclass(frozen=True)
class DataFile:
    """A file of a source, and what tells that it has changed."""

    location: str
    """Path or URL."""
    num_bytes: int
    version: str
    """Time of the last change, checksum, or whatever else the place of the file keeps of it."""

    @classmethod
    def at(cls, path: Path) -> "DataFile":
        """The file at a path of this machine.

        Raises:
            OSError: If there is none.
        """
        status = path.stat()
        return cls(str(path), status.st_size, str(status.st_mtime_ns))

    @property
    def name(self) -> str:
        """The last part of its location."""
        return self.location.rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        """Whether it must be fetched before it can be read."""
        return is_remote(self.location)

    @property
    def resolved(self) -> str:
        """Its location with links followed: two names of one file have one."""
        return self.location if self.is_remote else os.path.realpath(self.location)

    def digest(self, column: str, format_: int) -> str:
        """Name in the cache folder for what is worked out from a column of this file."""
        facts = json.dumps([format_, self.resolved, self.num_bytes, self.version, column])
        return hashlib.sha256(facts.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Folder:
    """What lies directly in a folder, here or in a store."""

    location: str
    files: Mapping[str, DataFile]
    """By name."""
    read: Callable[[str], bytes]
    """Content of the file of a name; raises ConfigError if it cannot be read."""

    def read_json(self, name: str) -> Any:
        """Content of a JSON file; none if it is not there or is not JSON.

        Raises:
            ConfigError: If it cannot be read.
        """
        if name not in self.files:
            return None
        content = self.read(name)
        try:
            return json.loads(content)
        except (RecursionError, ValueError):
            return None


def is_remote(location: str) -> bool:
    """Whether a location is a URL."""
    return _REMOTE in location
