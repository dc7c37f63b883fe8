"""Detection of changes to a data file while a run reads it.

A run maps its files for weeks. Reading a mapped page behind the end of a truncated file kills the
process without a message (SIGBUS), and a modified file changes the training without one. Size and
modification time are therefore compared before a read, and checksums of documents at checkpoints.
"""

import os
import time
import zlib
from pathlib import Path

from hlat.config.config_errors import ConfigError

STATUS_INTERVAL_S = 0.001
"""Time for which a comparison of size and modification time is valid: the duration of some reads,
each of which takes less time than the comparison."""
MAX_SAMPLES = 16
"""Documents of a file whose checksum is recorded, the first ones that are read."""
MAX_SAMPLE_BYTES = 1 << 16
"""Bytes of a document that its checksum covers."""


class FileContent:
    """The state of a local file when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._size, self._modified_ns = self._read_status()
        self.next_check_s = 0.0
        """Time of the monotonic clock from which on a read requires `validate_status` before."""
        self.needs_samples = True
        """True until `add_sample` has recorded MAX_SAMPLES documents."""
        self._samples: dict[int, tuple[int, int]] = {}
        """Length and checksum by position."""
        self._num_validated = 0

    def validate_status(self) -> None:
        """Raise ConfigError if the file is missing, or has another size or modification time."""
        self.next_check_s = time.monotonic() + STATUS_INTERVAL_S
        size, modified_ns = self._read_status()
        if size != self._size:
            raise self._build_error(f"it has {size:,} bytes instead of {self._size:,}")
        if modified_ns != self._modified_ns:
            modified = time.strftime("%F %T", time.localtime(modified_ns // 10**9))
            raise self._build_error(f"it was modified at {modified}")

    def add_sample(self, position: int, document: memoryview) -> None:
        """Record the checksum of a document at a position of the file."""
        if document:
            sample = document[:MAX_SAMPLE_BYTES]
            self._samples.setdefault(position, (len(sample), zlib.crc32(sample)))
            self.needs_samples = len(self._samples) < MAX_SAMPLES

    def validate_samples(self, count: int) -> None:
        """Read `count` of the recorded documents again, each time the next ones.

        Raises:
            ConfigError: If the file cannot be read, or a checksum differs.
        """
        samples = [*self._samples.items()]
        if not samples:
            return
        first, self._num_validated = self._num_validated, self._num_validated + count
        try:
            # The file of this name, which may not be the one that is mapped
            with open(self._path, "rb", buffering=0) as file:
                for number in range(first, first + min(count, len(samples))):
                    position, (length, checksum) = samples[number % len(samples)]
                    if zlib.crc32(os.pread(file.fileno(), length, position)) != checksum:
                        raise self._build_error(f"its bytes from {position:,} on differ")
        except OSError as error:
            raise self._build_error(error.strerror) from error

    def _read_status(self) -> tuple[int, int]:
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise self._build_error(error.strerror) from error
        return status.st_size, status.st_mtime_ns

    def _build_error(self, reason: object) -> ConfigError:
        return ConfigError(
            f"{self._path} has changed since the run opened it ({reason}); restore it, and run the "
            "same command again"
        )
