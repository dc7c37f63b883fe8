"""Discovery and reading of document files in local directories and object stores.

Downloaded corpora also contain cards and lists, and saved data sets contain caches. Document files
are selected by name, so that the complete list is known before any of them is read.
"""

import glob
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from hlat.config.config_errors import ConfigError
from hlat.data import source_files
from hlat.prepare import hub_datasets
from hlat.storage import remote_files
from hlat.storage.bounded_files import load_json, parse_json, validate_size
from hlat.storage.data_file import DataFile, is_remote
from hlat.storage.storage_protocols import open_filesystem

COMPRESSION_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html"),
        *(".htm"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh"),
        *(".java", ".kt", ".kts", ".scala", ".groovy", ".clj", ".go", ".rs", ".zig", ".nim"),
        *(".js", ".jsx", ".mjs", ".ts", ".tsx", ".vue", ".svelte", ".css", ".scss", ".rb"),
        *(".php", ".pl", ".pm", ".lua", ".r", ".jl", ".swift", ".m", ".mm", ".cs", ".fs"),
        *(".vb", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".dart", ".lisp", ".el", ".scm"),
        *(".f90", ".f", ".asm", ".s", ".v", ".sv", ".vhd", ".sh", ".bash", ".zsh", ".fish"),
        *(".ps1", ".sql", ".proto", ".thrift", ".cmake", ".mk", ".gradle", ".tf", ".yaml"),
        *(".yml", ".toml", ".ini", ".cfg"),
    }
)
"""Suffixes of prose and source code."""
FILE_FORMATS = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "lines"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
SUPPORTED_SUFFIXES = (
    ".txt, .md, source code, .jsonl, .json, .ndjson, .parquet, .arrow (also .gz, .zst, .bz2, .xz)"
)

_METADATA_FILES = frozenset(
    {
        *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
        *("manifest.json", "prepare_report.json", "prepare_report.md"),
    }
)


def detect_format(path: str) -> tuple[str, str | None] | None:
    """Return the format (`text`, `lines`, `parquet` or `arrow`) and codec of a file by its name.

    Files with only the suffix of a codec are lines, as in newer versions of peS2o. Returns None for
    other files.
    """
    *_, inner, last = "", "", *PurePosixPath(path).suffixes
    if file_format := FILE_FORMATS.get(last.lower()):
        return file_format, None
    codec = COMPRESSION_CODECS.get(last.lower())
    file_format = FILE_FORMATS.get(inner.lower()) if inner else "lines"
    return (file_format, codec) if codec and file_format else None


def is_text_file(path: str) -> bool:
    """Return True for plain text and source code, whose files are documents as a whole."""
    detected = detect_format(path)
    return detected is not None and detected[0] == "text"


def find_input_files(
    patterns: Iterable[str],
    output_dir: Path | None = None,
    skipped: Counter[str] | None = None,
) -> list[DataFile]:
    """Return the distinct files that match paths, directories, globs, URLs and data sets by path.

    The files of `output_dir`, the directory that is being prepared, are ignored. Other files that
    match and are not documents are counted by suffix in `skipped`.

    Raises:
        ConfigError: With all problems: no match, no supported file, no access, or a file and its
            compressed copy.
    """
    inputs: dict[str, DataFile] = {}
    problems: list[str] = []
    for pattern in patterns:
        try:
            matches = _match_pattern(pattern, Counter() if skipped is None else skipped)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        prefix = None if output_dir is None else f"{output_dir.absolute()}/"
        outside = {
            file.location: file
            for file in matches
            if not prefix or not file.location.startswith(prefix)
        }
        if matches and not outside:
            problems.append(f"{pattern}: is in output={output_dir}; choose another directory")
        if not matches:
            problems.append(f"{pattern}: contains no document file ({SUPPORTED_SUFFIXES})")
        inputs.update(outside)
    problems += _find_duplicates(inputs)
    if problems:
        raise ConfigError(*problems)
    return sorted(inputs.values(), key=lambda file: file.location)


def _find_duplicates(paths: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each file with a compressed copy."""
    first: dict[str, str] = {}
    for path in sorted(paths):
        detected = detect_format(path)
        is_compressed = detected is not None and detected[1] is not None
        stem = path.removesuffix(PurePosixPath(path).suffix) if is_compressed else path
        other = first.setdefault(stem, path)
        if other != path:
            yield f"{other} and {path}: the same documents, by their names; omit one of them"


def _match_pattern(pattern: str, skipped: Counter[str]) -> list[DataFile]:
    if not detect_format(pattern) and (dataset_id := hub_datasets.find_dataset_id(pattern)):
        return _list_dataset(pattern, dataset_id)
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
        data = [path for path in paths if detect_format(path) and not is_text_file(path)]
        files = data or [path for path in paths if is_text_file(path)]
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


def _list_matches(system: Any, path: str, pattern: str, skipped: Counter[str]) -> list[DataFile]:
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
            documents = _list_documents(system, name, skipped)
            inputs += [_build_data_file(system, file) for file in documents]
        elif detect_format(name):
            inputs.append(_build_data_file(system, name))
        elif names == [path]:
            raise ConfigError(f"{pattern}: has an unknown suffix; supported: {SUPPORTED_SUFFIXES}")
        else:
            skipped[get_suffix(name)] += 1
    return inputs


def _list_documents(system: Any, directory: str, skipped: Counter[str]) -> list[str]:
    """Return the document files below a directory, without hidden files, metadata and caches.

    Count the other files by suffix in `skipped`.
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
        names -= _METADATA_FILES
        paths += [f"{parent}/{name}" for name in names if detect_format(name)]
        skipped.update(get_suffix(name) for name in names if not detect_format(name))
    return paths


def get_suffix(name: str) -> str:
    """Return the suffix of a file name, with that before the suffix of a codec."""
    suffixes = PurePosixPath(name).suffixes
    count = 2 if suffixes and suffixes[-1].lower() in COMPRESSION_CODECS else 1
    return "".join(suffixes[-count:]).lower() or "no suffix"


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
