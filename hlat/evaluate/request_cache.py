"""Cache of the responses of models in an SQLite file.

An evaluation that was interrupted, or that is repeated with other tasks, does not compute the same
requests again. A key contains everything that determines a response besides rounding: weights,
architecture, tokenizer, engine, device and dtypes of the model, token ids, and settings of
generation.
"""

import hashlib
import json
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError

_TABLE = "CREATE TABLE IF NOT EXISTS responses (key BLOB PRIMARY KEY, response TEXT NOT NULL)"
_TIMEOUT_S = 60
"""Maximum wait for another process that writes to the file."""


class RequestCache:
    """Responses of one model by request, in a file that several models and processes may share."""

    def __init__(self, path: Path, model_fingerprint: str) -> None:
        """Open or create the file.

        Raises:
            ConfigError: If the file cannot be opened, or is not an SQLite database.
        """
        self._path, self._fingerprint = path, model_fingerprint
        self.num_hits = 0
        """Number of requests that were found."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_TIMEOUT_S)
            self._database.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise self._build_error(error) from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def load(self, requests: Sequence[Any]) -> list[Any]:
        """Return the response of each request, None if it is missing.

        The requests are values that JSON can represent and that determine the response. Raise
        ConfigError if the file is damaged.
        """
        query = "SELECT response FROM responses WHERE key = ?"
        try:
            rows = [
                self._database.execute(query, (self._build_key(request),)).fetchone()
                for request in requests
            ]
            responses = [None if row is None else json.loads(row[0]) for row in rows]
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise self._build_error(error) from error
        self.num_hits += sum(response is not None for response in responses)
        return responses

    def save(self, requests: Sequence[Any], responses: Sequence[Any]) -> None:
        """Save responses in one transaction.

        A warning is printed if the file cannot be written, since the evaluation can continue.
        """
        rows = zip(map(self._build_key, requests), map(json.dumps, responses), strict=True)
        try:
            with self._database:
                self._database.executemany("INSERT OR REPLACE INTO responses VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            message = f"WARNING: use_cache={self._path} cannot be written ({error})"
            print(message, file=sys.stderr, flush=True)

    def _build_error(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"use_cache={self._path} is not a file for cached responses ({error}); choose another "
            "file, or remove this one"
        )

    def _build_key(self, request: Any) -> bytes:
        return hashlib.sha256(f"{self._fingerprint} {json.dumps(request)}".encode()).digest()
