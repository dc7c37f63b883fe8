"""Discovery and reading of document files in local directories and object stores.

Downloaded corpora also contain cards and lists, and saved data sets contain caches. Document files
are selected by name, and by content if the name does not state a format, so that the complete list
is known before any of them is converted.
"""

import glob
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.data import source_files
from hlat.prepare import hub_datasets
from hlat.prepare.file_formats import SUPPORTED_FORMATS, detect_format, is_data_file, parse_name
from hlat.storage import remote_files
from hlat.storage.bounded_files import load_json, parse_json, validate_size
from hlat.storage.data_file import DataFile, is_remote
from hlat.storage.storage_protocols import open_filesystem

PREPARED_OUTPUT = "output of hlat prepare"
"""Reason to skip a file."""
_METADATA_FILES = frozenset(
    {
        *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
        *("manifest.json", "prepare_report.json", "prepare_report.md"),
    }
)


@dataclass(frozen=True)
class SkippedFile:
    """Matching file that is not an input."""

    path: str
    num_bytes: int
    reason: str


def find_input_files(
    patterns: Iterable[str],
    output_dir: Path | None = None,
    skipped: list[SkippedFile] | None = None,
) -> list[DataFile]:
    """Return the distinct files that match paths, directories, globs, URLs and data sets by path.

    Other files that match are added to `skipped`: those of `output_dir`, the directory that is
    being prepared, those of prepared directories within a directory, and files without documents.

    Raises:
        ConfigError: With all problems: no match, no supported file, no access, or a file and its
            compressed copy.
    """
    inputs: dict[str, DataFile] = {}
    problems: list[str] = []
    others: dict[str, SkippedFile] = {}
    for pattern in patterns:
        listed: list[SkippedFile] = []
        try:
            matches = _match_pattern(pattern, listed)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        prefix = None if output_dir is None else f"{output_dir.absolute()}/"
        for file in matches:
            if prefix and file.location.startswith(prefix):
                listed.append(SkippedFile(file.location, file.num_bytes, PREPARED_OUTPUT))
            else:
                inputs[file.location] = file
        if matches and all(file.location not in inputs for file in matches):
            problems.append(f"{pattern}: is in output={output_dir}; choose another directory")
        if not matches:
            problems.append(_format_no_match(pattern, listed))
        others |= {file.path: file for file in listed}
    problems += _find_duplicates(inputs)
    raise_config_errors(problems)
    if skipped is not None:
        skipped += [file for path, file in sorted(others.items()) if path not in inputs]
    return sorted(inputs.values(), key=lambda file: file.location)


def _format_no_match(pattern: str, listed: Sequence[SkippedFile]) -> str:
    reasons = Counter(file.reason for file in listed).most_common()
    counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
    found = f"; it contains {counts}" if counts else ""
    return f"{pattern}: contains no document file ({SUPPORTED_FORMATS}){found}"


def _find_duplicates(paths: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each file with a compressed copy."""
    first: dict[str, str] = {}
    for path in sorted(paths):
        _, codec = parse_name(path)
        stem = path.removesuffix(PurePosixPath(path).suffix) if codec else path
        other = first.setdefault(stem, path)
        if other != path:
            yield f"{other} and {path}: the same documents, by their names; omit one of them"


def _match_pattern(pattern: str, skipped: list[SkippedFile]) -> list[DataFile]:
    if parse_name(pattern) == (None, None) and (dataset := hub_datasets.find_dataset_id(pattern)):
        return _list_dataset(pattern, dataset)
    with _translate_errors(pattern, "read"):
        system, path = open_filesystem(pattern)
    with _translate_errors(pattern, "listed"):
        return _list_matches(system, path, pattern, skipped)


def _list_dataset(pattern: str, dataset_id: str) -> list[DataFile]:
    """Return the files of a data set of huggingface.co, without cards and lists."""
    url = f"hf://datasets/{dataset_id}"
    label = pattern if is_remote(pattern) else f"{pattern}: is no file or directory, and {url}"
    with _translate_errors(label, "listed"):
        filesystem, _ = open_filesystem(url)
        paths = hub_datasets.list_dataset_files(filesystem, dataset_id)
        data = [path for path in paths if is_data_file(path)]
        files = data or [path for path in paths if parse_name(path)[0] == "text"]
        names = [path for path in files if PurePosixPath(path).name not in _METADATA_FILES]
        return [_build_data_file(filesystem, name) for name in names]


@contextmanager
def _translate_errors(path: str, participle: str) -> Iterator[None]:
    """Raise the exceptions of file systems and their client libraries as ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"{path}: cannot be {participle} ({reason})") from error


def _list_matches(
    system: Any, path: str, pattern: str, skipped: list[SkippedFile]
) -> list[DataFile]:
    if system.exists(path):
        names = [path]
    elif glob.has_magic(path):
        directory = re.split(r"[*?[]", path, maxsplit=1)[0].rpartition("/")[0]
        names = [name for name in system.glob(path) if not _is_hidden(name, directory)]
    else:
        raise ConfigError(f"{pattern}: there is no such file or directory")
    inputs = []
    for name in names:
        if system.isdir(name):
            documents = _list_documents(system, name, skipped, is_input=names == [path])
            inputs += _select_documents(system, documents, skipped)
            continue
        found = _select_documents(system, [name], skipped)
        if not found and names == [path]:
            raise ConfigError(f"{pattern}: is {skipped[-1].reason}; supported: {SUPPORTED_FORMATS}")
        inputs += found
    return inputs


def _select_documents(
    system: Any, names: Iterable[str], skipped: list[SkippedFile]
) -> list[DataFile]:
    """Return the files with documents, by content if the name does not state the format.

    Add the other files to `skipped`.
    """
    inputs = []
    for name in names:
        file_format, _ = parse_name(name)
        if file_format is None and not system.isfile(name):
            skipped.append(SkippedFile(name, 0, "no regular file"))
            continue
        file = _build_data_file(system, name)
        if file_format is None or file_format == "table":
            with InputReader(file.location) as reader:
                problem = detect_format(reader, file.location).problem
            if problem:
                skipped.append(SkippedFile(file.location, file.num_bytes, problem))
                continue
        inputs.append(file)
    return inputs


def _list_documents(
    system: Any, directory: str, skipped: list[SkippedFile], is_input: bool
) -> list[str]:
    """Return the files below a directory without hidden files, metadata and caches.

    Add those of prepared directories to `skipped`, except `directory` itself with `is_input`.
    """
    files_by_parent: dict[str, set[str]] = {}
    for path in system.find(directory):
        if not _is_hidden(path, directory):
            parent, _, name = path.rpartition("/")
            files_by_parent.setdefault(parent, set()).add(name)
    paths = []
    for parent, names in files_by_parent.items():
        if "dataset_dict.json" in names:
            _validate_single_split(system, parent)
        if "state.json" in names and "dataset_info.json" in names:
            state = _load_json(system, f"{parent}/state.json")
            if not isinstance(state, dict):
                raise ConfigError(f"{parent}/state.json: is not an object; save the dataset again")
            names = set(source_files.list_saved_dataset_files(parent, names, state))
        found = [f"{parent}/{name}" for name in names - _METADATA_FILES]
        is_included = is_input and parent.rstrip("/") == directory.rstrip("/")
        if "manifest.json" in names and not is_included and _is_prepared(system, parent):
            skipped += [SkippedFile(path, system.size(path), PREPARED_OUTPUT) for path in found]
        else:
            paths += found
    return paths


def _is_prepared(system: Any, directory: str) -> bool:
    """Return True if a directory has a manifest of hlat prepare."""
    try:
        manifest = _load_json(system, f"{directory}/manifest.json")
    except ConfigError:
        return False
    return isinstance(manifest, dict) and {"format", "input_column", "files"} <= manifest.keys()


def _is_hidden(path: str, directory: str) -> bool:
    relative = path.removeprefix(directory.rstrip("/") + "/")
    return any(part.startswith(".") for part in relative.split("/"))


def _validate_single_split(system: Any, directory: str) -> None:
    """Raise ConfigError for a saved data set with several splits, such as a test set."""
    content = _load_json(system, f"{directory}/dataset_dict.json")
    splits = source_files.list_splits(directory, content)
    if len(splits) > 1:
        raise ConfigError(
            f"{directory}: is a saved data set with the splits {', '.join(splits)}; specify the "
            f"directory of one, such as {directory}/{splits[0]}"
        )


def _load_json(system: Any, path: str) -> Any:
    """Return the content of a small JSON file, or raise ConfigError."""
    try:
        if isinstance(system, LocalFileSystem):
            return load_json(Path(path))
        validate_size(path, system.size(path))
        return parse_json(system.cat_file(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({reason})") from error


def _build_data_file(system: Any, name: str) -> DataFile:
    if isinstance(system, LocalFileSystem):
        path = Path(os.path.abspath(name))
        if not path.is_file():
            raise ConfigError(f"{path}: is no regular file; a pipe or device cannot be prepared")
        return DataFile.from_path(path)
    return remote_files.build_data_file(system, system.info(name))


class InputReader(io.RawIOBase):
    """Binary reader of an input file that raises ConfigError with its name on failure.

    Args:
        path: Path or URL.
        on_progress: Called with the number of bytes of each read.

    Raises:
        ConfigError: If the file cannot be opened.
    """

    def __init__(self, path: str, on_progress: Callable[[int], None] = lambda _: None) -> None:
        self._path, self._on_progress = path, on_progress
        self.num_bytes_read = 0
        with _translate_errors(path, "read"):
            system, inner = open_filesystem(path)
            self._file: BinaryIO = system.open(inner, "rb")

    def readable(self) -> bool:
        """Return True."""
        return True

    seekable = readable  # in all file systems of fsspec

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes, by default the rest."""
        with _translate_errors(self._path, "read"):
            block = self._file.read(-1 if size is None else size)
        self.num_bytes_read += len(block)
        self._on_progress(len(block))
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set and return the position in bytes."""
        with _translate_errors(self._path, "read"):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file; further calls have no effect."""
        if not self.closed:
            self._file.close()
        super().close()
