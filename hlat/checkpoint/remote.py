"""A folder or file in an object store, or wherever else fsspec has a driver for.

It answers to the part of pathlib that the store of checkpoints needs. What drivers raise is told as
the errors of a disk, with the URL, and nothing here takes silence for absence: fsspec's `exists`
and `isdir` say no when a store says nothing at all, and what is absent may be written over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import EISDIR, ENOENT
from typing import Any

PARALLEL_BYTES = 64 << 20
"""Read at once, in bytes; in memory meanwhile."""

_REQUEST_BYTES = 8 << 20


class UnansweredError(OSError):
    """A store did not do as it was asked, which says nothing about what it holds."""


@dataclass(frozen=True)
class RemotePath:
    """A URL, in pathlib's words.

    Attributes:
        url: As the user knows it.
        filesystem: fsspec's driver.
        path: What the driver calls it. Names are appended to it, never parsed as parts of a URL.
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
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """All but the last part."""
        url, path = self.url.rpartition("/")[0], self.path.rpartition("/")[0]
        return RemotePath(url, self.filesystem, path)

    def with_name(self, name: str) -> "RemotePath":
        """Another name in the same folder."""
        return self.parent / name

    def sizes(self) -> dict[str, int | None]:
        """What lies in the folder: bytes of each file by name, None for what is none.

        A folder that does not exist is as good as empty: an object store knows no difference.

        Raises:
            UnansweredError: The store does not tell.
        """
        with self._told():
            self.filesystem.invalidate_cache()  # other processes write here too
            try:
                found = self.filesystem.ls(self.path, detail=True)
            except FileNotFoundError:
                return {}
        inside = [info for info in found if info["name"].rstrip("/") != self.path.rstrip("/")]
        return {info["name"].rstrip("/").rpartition("/")[2]: _size(info) for info in inside}

    def iterdir(self) -> Iterator["RemotePath"]:
        """What lies in the folder."""
        return (self / name for name in self.sizes())

    def exists(self) -> bool:
        """Whether its folder lists it."""
        return self.name in self.parent.sizes()

    def is_dir(self) -> bool:
        """Whether anything lies in it."""
        return bool(self.sizes())

    def modified(self) -> float:
        """When the file was last changed, in seconds since 1970."""
        with self._told():
            return float(self.filesystem.modified(self.path).timestamp())

    def read_bytes(self) -> bytes:
        """The whole file."""
        return b"".join(self.blocks())

    def blocks(self) -> Iterator[bytes]:
        """The file, in order and in large pieces.

        Raises:
            FileNotFoundError: There is none.
            UnansweredError: The store does not give it.
        """
        with self._told():
            size = self.filesystem.info(self.path)["size"]
        for begin in range(0, size, PARALLEL_BYTES):
            yield self.read_range(begin, min(begin + PARALLEL_BYTES, size))

    def read_range(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`, or as many of them as there are.

        Where the driver can, several requests are under way at once.
        """
        begins = range(begin, end, _REQUEST_BYTES)
        ends = [min(at + _REQUEST_BYTES, end) for at in begins]
        paths = [self.path] * len(ends)
        with self._told():
            found = self.filesystem.cat_ranges(paths, list(begins), ends)
            for piece in found:
                if isinstance(piece, Exception):
                    raise piece
            return b"".join(found)

    @contextmanager
    def create(self) -> Iterator["Upload"]:
        """Write the file anew; it is there when this returns.

        Raises:
            UnansweredError: The store does not take it.
        """
        with self._told():
            upload = Upload(self, self._make(lambda: self.filesystem.open(self.path, "wb")))
        try:
            yield upload
        except BaseException:
            with suppress(OSError):
                upload.close()
            raise
        upload.close()

    def copy_to(self, target: "RemotePath") -> None:
        """Copy the file, within the store if its driver can."""
        with self._told():
            target._make(lambda: self.filesystem.cp_file(self.path, target.path))

    def unlink(self) -> None:
        """Remove the file, if it is there."""
        with self._told():
            try:
                self.filesystem.rm_file(self.path)
            except FileNotFoundError:
                return

    def remove(self) -> None:
        """Remove the folder and all that lies in it, if it is there."""
        with self._told():
            self.filesystem.invalidate_cache()
            try:
                self.filesystem.rm(self.path, recursive=True)
            except FileNotFoundError:
                return

    def _make(self, action: Callable[[], Any]) -> Any:
        """Do what makes the file, in a folder that only some stores want to exist before it."""
        try:
            return action()
        except FileNotFoundError:
            self.filesystem.makedirs(self.parent.path, exist_ok=True)
            return action()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Translate whatever a client library raises."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(ENOENT, "No such file", self.url) from error
        except IsADirectoryError as error:
            raise IsADirectoryError(EISDIR, "Is a folder", self.url) from error
        except Exception as error:
            raise UnansweredError(f"{self.url}: {reason(error)}") from error


class Upload:
    """A file that is being written, in blocks of bounded size.

    Args:
        target: Where it goes.
        file: fsspec's.
    """

    def __init__(self, target: RemotePath, file: Any) -> None:
        self._target, self._file = target, file

    def write(self, part: "bytes | memoryview") -> None:
        """Write the next bytes."""
        view = memoryview(part)
        for begin in range(0, len(view), _REQUEST_BYTES):
            with self._target._told():
                self._file.write(bytes(view[begin : begin + _REQUEST_BYTES]))

    def tell(self) -> int:
        """Bytes that were written."""
        return int(self._file.tell())

    def close(self) -> None:
        """Send the rest; whatever was interrupted is there in part and for nobody to read."""
        with self._target._told():
            self._file.close()


def reason(error: Exception) -> str:
    """What a client library says, in a line."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, UnansweredError):
        told = str(error)
    elif isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        told = f"{error.filename}: {error.__cause__}"
    return told.splitlines()[0]


def _size(info: dict[str, Any]) -> int | None:
    plain = info["type"] == "file" and not info.get("islink")
    return int(info["size"]) if plain else None
