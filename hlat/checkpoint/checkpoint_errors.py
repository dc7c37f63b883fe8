"""Errors of damaged files, which callers catch to fall back to an older checkpoint."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.storage.remote_path import StorageUnavailableError

_MAX_LISTED = 5


class CorruptCheckpointError(ConfigError):
    """Checkpoint that is incomplete or differs from what was written."""


@contextmanager
def raise_as_corrupt(path: object, *other_errors: type[Exception]) -> Iterator[None]:
    """Raise OSError and `other_errors` of reading `path` as CorruptCheckpointError.

    A failed request to an object store is raised as it is.
    """
    errors: tuple[type[Exception], ...] = (OSError, *other_errors)
    try:
        yield
    except StorageUnavailableError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise CorruptCheckpointError(f"{path} cannot be read ({reason})") from error


def parse_json_object(content: bytes, path: object) -> dict[str, Any]:
    """Return the JSON object in the contents of a file.

    Raises:
        CorruptCheckpointError: If the contents are not a JSON object.
    """
    try:
        value = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} is not a JSON object")
    return value


def raise_problems(problems: list[str]) -> None:
    """Raise ConfigError with the first problems and the number of the others, if there are any."""
    num_more = len(problems) - _MAX_LISTED
    if problems:
        rest = [f"and {num_more} more of the kind"] if num_more > 0 else []
        raise ConfigError(*problems[:_MAX_LISTED], *rest)
