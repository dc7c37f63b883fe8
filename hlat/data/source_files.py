"""Resolution of a source's paths to its Arrow and Parquet files, local or in an object store.

A directory may also contain indices, manifests, caches of other tools or the same documents in a
second format. Anything that is not clearly a data file is therefore an error with a remedy.
"""

import glob
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.data import embedded_corpus, row_index
from hlat.storage import remote_files
from hlat.storage.bounded_files import read_bounded
from hlat.storage.data_file import DataDirectory, DataFile, is_remote

EMBEDDED_PREFIX = "embedded:"
PREPARE_COMMAND = "hlat prepare"
"""The command that converts other formats."""

_ARROW_SUFFIX = ".arrow"
_PARQUET_SUFFIXES = (".parquet", ".pq")
_JSON_SUFFIXES = tuple(
    f"{suffix}{compression}"
    for suffix in (".jsonl", ".ndjson", ".json")
    for compression in ("", ".gz", ".zst", ".bz2", ".xz")
)
_DATASET_STATE_FILE = "state.json"
_DATASET_DICT_FILE = "dataset_dict.json"
_DATASET_INFO_FILE = "dataset_info.json"
_MANIFEST_FILE = "manifest.json"
_METADATA_FILES = (
    *(_DATASET_STATE_FILE, _DATASET_DICT_FILE, _DATASET_INFO_FILE, _MANIFEST_FILE),
    *("prepare_report.json", "prepare_report.md"),
)
_DATASETS_CACHE_PREFIX = "cache-"


def find_source_files(config_key: str, root: str, patterns: Iterable[str]) -> list[DataFile]:
    """List the files of a source without duplicates, ordered by location only.

    Relative patterns (see `hlat.config.data.SourceConfig.paths`) refer to the directory or URL
    `root`.

    Raises:
        ConfigError: If a pattern matches no file or an unreadable format.
    """
    sort_keys: dict[DataFile, str] = {}
    for pattern in patterns:
        for file, sort_key in _match_pattern(config_key, root, pattern):
            sort_keys[file] = min(sort_key, sort_keys.get(file, sort_key))
    if not sort_keys:
        raise ConfigError(
            f"{config_key}: is empty; list files, folders, globs, URLs or embedded:<name>"
        )
    return sorted(sort_keys, key=lambda file: sort_keys[file].split("/"))


def _match_pattern(config_key: str, root: str, pattern: str) -> Iterator[tuple[DataFile, str]]:
    """Yield the files of one pattern with their sort keys."""
    location = pattern
    if pattern.startswith(EMBEDDED_PREFIX):
        name = pattern.removeprefix(EMBEDDED_PREFIX)
        location = str(embedded_corpus.get_embedded_source_file(config_key, name))
    elif is_remote(root) and not (is_remote(pattern) or Path(pattern).is_absolute()):
        location = f"{root.rstrip('/')}/{pattern}"
    elif not is_remote(pattern):
        location = str(Path(root).expanduser() / Path(pattern).expanduser())
    matches = _list_location(config_key, location)
    if isinstance(matches, DataDirectory):
        yield from _select_data_files(config_key, matches)
        return
    files = [file for file in matches if not file.name.endswith(row_index.INDEX_SUFFIX)]
    if not files:
        raise _build_no_match_error(config_key, location)
    _validate_no_json_files(config_key, location, [file.name for file in files])
    for file in files:
        yield file, file.location


def _list_location(config_key: str, location: str) -> DataDirectory | list[DataFile]:
    if is_remote(location):
        return remote_files.list_files(config_key, location)
    path = Path(location)
    try:
        if path.is_dir():
            children = [child for child in path.iterdir() if child.is_file()]
            files = {child.name: DataFile.from_path(child) for child in children}
            return DataDirectory(location, files, lambda name: _read_file(config_key, path / name))
        matches = [path] if path.is_file() else map(Path, glob.glob(location, recursive=True))
        return [DataFile.from_path(match) for match in matches if match.is_file()]
    except OSError as error:
        raise ConfigError(f"{config_key}: cannot list {location} ({error.strerror})") from error


def _read_file(config_key: str, path: Path) -> bytes:
    try:
        return read_bounded(path)
    except OSError as error:
        raise ConfigError(f"{config_key}: cannot read {path} ({error.strerror})") from error


def _build_no_match_error(config_key: str, location: str) -> ConfigError:
    return ConfigError(
        f"{config_key}: no file matches '{location}'; set data.root or the paths of this source"
    )


def _validate_no_json_files(config_key: str, location: str, names: Sequence[str]) -> None:
    for name in names:
        if name.lower().endswith(_JSON_SUFFIXES) and name not in _METADATA_FILES:
            raise _build_unprepared_error(config_key, location, name)


def _build_unprepared_error(config_key: str, location: str, name: str) -> ConfigError:
    return ConfigError(
        f"{config_key}: {location} holds {name}, which has no rows that can be read at random; "
        f"convert it once with `{PREPARE_COMMAND} {location} output=DIR` and name that folder"
    )


def _select_data_files(config_key: str, directory: DataDirectory) -> Iterator[tuple[DataFile, str]]:
    """Yield the data files of a directory with their sort keys."""
    location = directory.location
    if _DATASET_DICT_FILE in directory.files:
        splits = list_splits(location, directory.read_json(_DATASET_DICT_FILE), f"{config_key}: ")
        names = [f"{location}/{name}" for name in splits]
        raise ConfigError(
            f"{config_key}: {location} is a dataset of several splits; name one: {', '.join(names)}"
        )
    dataset_state = directory.read_json(_DATASET_STATE_FILE)
    if isinstance(dataset_state, dict) and "_data_files" in dataset_state:
        names = list_saved_dataset_files(
            location, directory.files, dataset_state, f"{config_key}: "
        )
        for position, name in enumerate(names):
            yield directory.files[name], f"{location}/{position:09}"
        return
    _validate_manifest(config_key, directory)
    names = [name for name in directory.files if name.endswith((_ARROW_SUFFIX, *_PARQUET_SUFFIXES))]
    if _DATASET_INFO_FILE in directory.files:
        names = [name for name in names if not name.startswith(_DATASETS_CACHE_PREFIX)]
    if not names:
        others = sorted(set(directory.files) - {*_METADATA_FILES})
        if others:
            raise _build_unprepared_error(config_key, location, others[0])
        raise _build_no_match_error(
            config_key, f"{location}/*{_ARROW_SUFFIX}' or '*{_PARQUET_SUFFIXES[0]}"
        )
    if len({name.endswith(_ARROW_SUFFIX) for name in names}) > 1:
        raise ConfigError(
            f"{config_key}: {location} holds both *{_ARROW_SUFFIX} and *{_PARQUET_SUFFIXES[0]}, "
            f"perhaps the same documents twice; name one: {location}/*{_ARROW_SUFFIX}"
        )
    for name in names:
        yield directory.files[name], directory.files[name].location


def list_splits(location: str, dataset_dict: Any, error_prefix: str = "") -> list[str]:
    """Return the names of the splits in the dataset_dict.json of a directory.

    Raises:
        ConfigError: If the content is no object with a list of names.
    """
    splits = dataset_dict.get("splits") if isinstance(dataset_dict, dict) else None
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise ConfigError(
            f"{error_prefix}{location}/{_DATASET_DICT_FILE} has no list of splits; copy or save "
            "the dataset again, or name the directory of one split"
        )
    return splits


def list_saved_dataset_files(
    location: str,
    existing_names: Container[str],
    dataset_state: Mapping[str, Any],
    error_prefix: str = "",
) -> list[str]:
    """Return the names of the files of `datasets.Dataset.save_to_disk` in its order.

    Raises:
        ConfigError: If the rows have a separate index, or a file is not in the directory.
    """
    if dataset_state.get("_indices_files") or dataset_state.get("_indices_data_files"):
        raise ConfigError(
            f"{error_prefix}{location} was saved with an indices mapping (a selection or shuffle "
            "of its rows), which is separate from the rows; save it after flatten_indices()"
        )
    try:
        names = [str(entry["filename"]) for entry in dataset_state["_data_files"]]
    except (TypeError, KeyError):
        names = []
    missing = [name for name in names if name not in existing_names]
    if missing or not names:
        raise ConfigError(
            f"{error_prefix}state.json of {location} lists {', '.join(missing) or 'no file'}"
            f"{', which is missing' if missing else ''}; copy or save the dataset again"
        )
    return names


def _validate_manifest(config_key: str, directory: DataDirectory) -> None:
    """Raise ConfigError if files differ from the manifest of a prepared directory."""
    manifest = directory.read_json(_MANIFEST_FILE)
    try:
        sizes = {str(entry["name"]): int(entry["bytes"]) for entry in manifest["files"]}
    except (TypeError, KeyError, ValueError):
        return  # no manifest, or one of another tool
    except OverflowError as error:
        raise ConfigError(
            f"{config_key}: {directory.location}/{_MANIFEST_FILE} has a size that is not finite; "
            "copy it again, or prepare the folder again"
        ) from error
    found = {name: file.num_bytes for name, file in directory.files.items()}
    differences = {
        name: f"has {found[name]} bytes, not {size}" if name in found else "is missing"
        for name, size in sizes.items()
        if found.get(name) != size
    }
    remedy = "as manifest.json beside it says; copy it again, or prepare the folder again"
    raise_config_errors(
        f"{config_key}: {directory.location}/{name} {difference} {remedy}"
        for name, difference in differences.items()
    )
