"""Files of data sets on huggingface.co: the training split, in Parquet if the hub converted it.

The hub converts most data sets to Parquet in the branch `refs/convert/parquet`, with one directory
per subset and split. Other data sets consist of the files of their repository.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from hlat.config.config_errors import ConfigError

_PREFIX = "hf://datasets/"
_BRANCH = "@refs%2Fconvert%2Fparquet"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_OTHER_KINDS = ("datasets/", "models/", "spaces/", "buckets/")
_PARTIAL_PREFIX = "partial-"
"""Prefix of the splits that the hub converted in part, because of their size."""
_TRAIN = "train"


def find_dataset_id(location: str) -> str | None:
    """Return the id of a data set given as `hf://[datasets/]OWNER/NAME` or `OWNER/NAME`.

    Return None for an existing path, a glob, another URL, and a path within a data set.
    """
    if location.startswith("hf://"):
        name = location.removeprefix(_PREFIX).removeprefix("hf://").rstrip("/")
        return name if _REPOSITORY.fullmatch(name) and f"{name}/" not in _OTHER_KINDS else None
    is_path = Path(location).expanduser().exists() or location.startswith((".", "~", "/"))
    return None if is_path or not _REPOSITORY.fullmatch(location) else location


def list_dataset_files(filesystem: Any, dataset_id: str) -> list[str]:
    """Return the paths of the files of the training split of a data set.

    Raises:
        ConfigError: If it has several subsets, or several splits without a training split.
    """
    root = f"datasets/{dataset_id}"
    subsets = _list_directories(filesystem, f"{root}{_BRANCH}")
    if subsets:
        subset = _choose(dataset_id, "subsets", subsets, "default")
        splits = _list_directories(filesystem, f"{root}{_BRANCH}/{subset}")
        if splits and not any(name.startswith(_PARTIAL_PREFIX) for name in splits):
            split = _choose(dataset_id, f"splits of {subset}", splits, _TRAIN, f"{subset}/")
            return sorted(filesystem.find(f"{root}{_BRANCH}/{subset}/{split}"))
    paths = sorted(filesystem.find(root))
    training = [path for path in paths if _TRAIN in path.removeprefix(root)]
    return training or paths


def _list_directories(filesystem: Any, path: str) -> list[str]:
    """Return the names of the directories in a directory; none if it does not exist."""
    try:
        entries = filesystem.ls(path, detail=True)
    except FileNotFoundError:
        return []
    return sorted(
        PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "directory"
    )


def _choose(dataset_id: str, label: str, names: list[str], default: str, parent: str = "") -> str:
    if len(names) == 1:
        return names[0]
    if default in names:
        return default
    example = f"{_PREFIX}{dataset_id}{_BRANCH}/{parent}{names[0]}"
    raise ConfigError(
        f"{dataset_id}: has the {label} {', '.join(names)}; specify one, such as {example}"
    )
