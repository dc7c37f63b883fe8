"""Path of the newest valid checkpoint."""

from typing import Any

from hlat.checkpoint.checkpoint_lookup import find_newest_checkpoint
from hlat.storage.storage_path import StoragePath


def find_newest_valid(
    checkpoints_dir: StoragePath, **settings: Any
) -> tuple[StoragePath | None, list[str]]:
    """Return the path and messages of `find_newest_checkpoint`."""
    newest, problems = find_newest_checkpoint(checkpoints_dir, **settings)
    return (newest.path if newest else None), problems
