"""Which files a source's paths name: data files, here or in a store, and nothing that lies near.

People point at a folder, and folders hold more than data: indices, manifests, what another tool
cached, the same documents in a second format. Reading any of these as documents would go unnoticed
for a whole run, so what is not plainly a data file is refused, with the sentence that helps.
"""

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.data import embedded, remote, row_index
from hlat.data.data_file import DataFile, Folder, is_remote

EMBEDDED_PREFIX = "embedded:"
PREPARE = "python -m hlat.prepare"
"""The command that converts what no run can read as it is."""

_ARROW = ".arrow"
_PARQUET = (".parquet", ".pq")
_TO_PREPARE = tuple(
    f"{kind}{packing}"
    for kind in (".jsonl", ".ndjson", ".json")
    for packing in ("", ".gz", ".zst", ".bz2")
)
_SAVED = "state.json"
_SPLITS = "dataset_dict.json"
_INFO = "dataset_info.json"
_MANIFEST = "manifest.json"
_CACHED_BY_DATASETS = "cache-"


def find_files(key: str, root: str, patterns: Iterable[str]) -> list[DataFile]:
    """List the files of a source, each once, in an order that only their locations decide.

    Args:
        key: Config key of the patterns, for messages.
        root: Folder or URL that relative patterns start from.
        patterns: Files, folders, globs, URLs of these, or `embedded:<name>`; see
            `hlat.config.data.Source.paths`.

    Raises:
        ConfigError: If a pattern names no file, or something that cannot be read.
    """
    found: dict[DataFile, str] = {}
    for pattern in patterns:
        for file, order in _match(key, root, pattern):
            found[file] = min(order, found.get(file, order))
    if not found:
        raise ConfigError(f"{key}: is empty; list files, folders, globs, URLs or embedded:<name>")
    return sorted(found, key=lambda file: found[file].split("/"))


def _match(key: str, root: str, pattern: str) -> Iterator[tuple[DataFile, str]]:
    """The files of one pattern, each with what it is sorted by."""
    location = pattern
    if pattern.startswith(EMBEDDED_PREFIX):
        location = str(embedded.source_file(key, pattern.removeprefix(EMBEDDED_PREFIX)))
    elif is_remote(root) and not (is_remote(pattern) or Path(pattern).is_absolute()):
        location = f"{root.rstrip('/')}/{pattern}"
    elif not is_remote(pattern):
        location = str(Path(root).expanduser() / Path(pattern).expanduser())
    matches = _list(key, location)
    if isinstance(matches, Folder):
        yield from _choose(key, matches)
        return
    files = [file for file in matches if not file.name.endswith(row_index.SUFFIX)]
    if not files:
        raise _no_file(key, location)
    for file in files:
        _refuse_what_to_prepare(key, location, [file.name])
        yield file, file.location


def _list(key: str, location: str) -> Folder | list[DataFile]:
    if is_remote(location):
        return remote.list_files(key, location)
    path = Path(location)
    try:
        if path.is_dir():
            files = {child.name: DataFile.at(child) for child in path.iterdir() if child.is_file()}
            return Folder(location, files, lambda name: _read(key, path / name))
        matches = [path] if path.is_file() else map(Path, glob.glob(location, recursive=True))
        return [DataFile.at(match) for match in matches if match.is_file()]
    except OSError as error:
        raise ConfigError(f"{key}: cannot list {location} ({error.strerror})") from error


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path} ({error.strerror})") from error


def _no_file(key: str, location: str) -> ConfigError:
    return ConfigError(
        f"{key}: no file matches '{location}'; set data.root or the paths of this source"
    )


def _refuse_what_to_prepare(key: str, location: str, names: Sequence[str]) -> None:
    for name in names:
        is_about_data = name in (_SAVED, _SPLITS, _INFO, _MANIFEST)
        if name.lower().endswith(_TO_PREPARE) and not is_about_data:
            raise ConfigError(
                f"{key}: {location} holds {name}, which has no rows that can be read at random; "
                f"convert it once with `{PREPARE} {location} --output DIR` and name that folder"
            )


def _choose(key: str, folder: Folder) -> Iterator[tuple[DataFile, str]]:
    """The data files of a folder, each with what it is sorted by."""
    _refuse_splits(key, folder)
    saved = folder.read_json(_SAVED)
    if isinstance(saved, dict) and "_data_files" in saved:
        yield from _choose_saved(key, folder, saved)
        return
    _check_manifest(key, folder)
    names = [name for name in folder.files if name.endswith((_ARROW, *_PARQUET))]
    if _INFO in folder.files:
        names = [name for name in names if not name.startswith(_CACHED_BY_DATASETS)]
    if not names:
        _refuse_what_to_prepare(key, folder.location, sorted(folder.files))
        raise _no_file(key, f"{folder.location}/*{_ARROW}' or '*{_PARQUET[0]}")
    if len({name.endswith(_ARROW) for name in names}) > 1:
        raise ConfigError(
            f"{key}: {folder.location} holds both *{_ARROW} and *{_PARQUET[0]}, perhaps the same "
            f"documents twice; name one: {folder.location}/*{_ARROW}"
        )
    for name in names:
        yield folder.files[name], folder.files[name].location


def _refuse_splits(key: str, folder: Folder) -> None:
    """Refuse what `datasets.DatasetDict.save_to_disk` writes: which split is meant?"""
    splits = folder.read_json(_SPLITS)
    if isinstance(splits, dict):
        names = [f"{folder.location}/{name}" for name in splits.get("splits", [])]
        raise ConfigError(
            f"{key}: {folder.location} is a dataset of several splits; name one: {', '.join(names)}"
        )


def _choose_saved(
    key: str, folder: Folder, state: Mapping[str, Any]
) -> Iterator[tuple[DataFile, str]]:
    """The files of what `datasets.Dataset.save_to_disk` wrote, in its order."""
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigError(
            f"{key}: {folder.location} was saved with an indices mapping (a selection or shuffle "
            "of its rows), which lies beside the rows; save it after flatten_indices()"
        )
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (TypeError, KeyError):
        names = []
    missing = [name for name in names if name not in folder.files]
    if missing or not names:
        raise ConfigError(
            f"{key}: state.json of {folder.location} lists {', '.join(missing) or 'no file'}"
            f"{', which is missing' if missing else ''}; copy or save the dataset again"
        )
    for position, name in enumerate(names):
        yield folder.files[name], f"{folder.location}/{position:09}"


def _check_manifest(key: str, folder: Folder) -> None:
    """Refuse a folder that is not as its manifest says that it was written."""
    manifest = folder.read_json(_MANIFEST)
    try:
        sizes = {str(entry["name"]): int(entry["bytes"]) for entry in manifest["files"]}
    except (TypeError, KeyError, ValueError):
        return  # there is none, or it is another tool's
    problems = []
    for name, num_bytes in sizes.items():
        file = folder.files.get(name)
        if file is None:
            problems.append(f"{key}: {folder.location}/{name} is missing")
        elif file.num_bytes != num_bytes:
            problems.append(f"{key}: {file.location} has {file.num_bytes} bytes, not {num_bytes}")
    if problems:
        remedy = "as manifest.json beside it says; copy it again, or prepare the folder again"
        raise ConfigError(*(f"{problem} {remedy}" for problem in problems))
