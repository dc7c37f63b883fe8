"""Paths in object stores and other file systems that fsspec has a driver for.

Existence is decided by listing the parent directory, because `exists` and `isdir` of fsspec (and
of universal_pathlib, which calls them) also return False when a request fails, and files reported
as absent may be overwritten (docs/adr/0038).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import EISDIR, ENOENT
from typing import Any

READ_BLOCK_BYTES = 64 << 20
"""Bytes that are read with parallel requests and held in memory at once."""

_REQUEST_BYTES = 8 << 20


class StorageUnavailableError(OSError):
    """Failed request to a store, after which the state of the store is unknown."""


@dataclass(frozen=True)
class RemotePath:
    """URL with the methods of pathlib that the checkpoint store uses; drivers' errors are OSErrors.

    `path` is the path within `filesystem`.
    """

    url: str
    filesystem: Any = field(compare=False, repr=False)
    path: str = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", self.filesystem, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """Directory of the path."""
        url, path = self.url.rpartition("/")[0], self.path.rpartition("/")[0]
        return RemotePath(url, self.filesystem, path)

    def with_name(self, name: str) -> "RemotePath":
        """Return the path of `name` in the same directory."""
        return self.parent / name

    def list_sizes(self) -> dict[str, int | None]:
        """Return the size in bytes of each file in the directory by name; None for other entries.

        A directory that does not exist is empty: object stores do not distinguish the two.
        """
        sizes: dict[str, int | None] = {}
        with self._translate_errors(), suppress(FileNotFoundError):
            self.filesystem.invalidate_cache()  # other processes write to the store
            for info in self.filesystem.ls(self.path, detail=True):
                path = info["name"].rstrip("/")
                if path != self.path.rstrip("/"):
                    is_plain_file = info["type"] == "file" and not info.get("islink")
                    sizes[path.rpartition("/")[2]] = int(info["size"]) if is_plain_file else None
        return sizes

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield the paths in the directory."""
        return (self / name for name in self.list_sizes())

    def exists(self) -> bool:
        """Return True if the parent directory lists the path."""
        return self.name in self.parent.list_sizes()

    def is_dir(self) -> bool:
        """Return True if the directory has at least one entry."""
        return bool(self.list_sizes())

    def modified(self) -> float:
        """Return the modification time of the file in seconds since 1970."""
        with self._translate_errors():
            return float(self.filesystem.modified(self.path).timestamp())

    def read_bytes(self) -> bytes:
        """Return the contents of the file."""
        return b"".join(self.iter_blocks())

    def iter_blocks(self) -> Iterator[bytes]:
        """Yield the contents of the file in blocks of `READ_BLOCK_BYTES`."""
        with self._translate_errors():
            size = self.filesystem.info(self.path)["size"]
        for begin in range(0, size, READ_BLOCK_BYTES):
            yield self.read_range(begin, min(begin + READ_BLOCK_BYTES, size))

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` (exclusive), fewer at the end of the file.

        Drivers that support it read ranges of `_REQUEST_BYTES` in parallel.
        """
        begins = range(begin, end, _REQUEST_BYTES)
        ends = [min(start + _REQUEST_BYTES, end) for start in begins]
        with self._translate_errors():
            results = self.filesystem.cat_ranges([self.path] * len(ends), list(begins), ends)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            return b"".join(results)

    def write_blocks(self, blocks: Iterable["bytes | memoryview"]) -> None:
        """Write the file, replacing an existing one; it is complete when the call returns.

        Exceptions raised by `blocks` propagate unchanged and leave an incomplete file.
        """
        with self._translate_errors():
            file = self._create_with_parents(lambda: self.filesystem.open(self.path, "wb"))
        try:
            for block in blocks:
                for begin in range(0, len(block), _REQUEST_BYTES):
                    part = bytes(memoryview(block)[begin : begin + _REQUEST_BYTES])
                    with self._translate_errors():
                        file.write(part)
        except BaseException:
            with suppress(Exception):
                file.close()
            raise
        with self._translate_errors():
            file.close()

    def copy_to(self, target: "RemotePath") -> None:
        """Copy the file, within the store if the driver supports it."""
        with self._translate_errors():
            target._create_with_parents(lambda: self.filesystem.cp_file(self.path, target.path))

    def unlink(self) -> None:
        """Remove the file if it exists."""
        with self._translate_errors(), suppress(FileNotFoundError):
            self.filesystem.rm_file(self.path)

    def remove(self) -> None:
        """Remove the directory and its contents if it exists."""
        with self._translate_errors(), suppress(FileNotFoundError):
            self.filesystem.invalidate_cache()
            self.filesystem.rm(self.path, recursive=True)

    def _create_with_parents(self, create: Callable[[], Any]) -> Any:
        """Call `create`; on FileNotFoundError create the parent directory and call it again."""
        try:
            return create()
        except FileNotFoundError:
            self.filesystem.makedirs(self.parent.path, exist_ok=True)
            return create()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise the exceptions of a client library as OSError with the URL."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(ENOENT, "No such file", self.url) from error
        except IsADirectoryError as error:
            raise IsADirectoryError(EISDIR, "Is a directory", self.url) from error
        except Exception as error:
            raise StorageUnavailableError(f"{self.url}: {format_reason(error)}") from error


def format_reason(error: Exception) -> str:
    """Return the message of a client library's exception in one line."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, StorageUnavailableError):
        reason = str(error)
    elif isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        reason = f"{error.filename}: {error.__cause__}"
    return reason.splitlines()[0]
