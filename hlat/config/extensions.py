"""Extensions: files of the user that register components.

A file is loaded only if the command line names it: `extensions=[my/gated_attention.py]`. No
configuration file can name one, and the copy in a run directory is compared and never imported. A
job of a launcher loads the copies in the directory that its own submission wrote.
"""

import difflib
import hashlib
import json
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import hlat.config.run  # noqa: F401  registers the components of hlat
from hlat.config import components
from hlat.config.config_errors import ConfigError, escape_control_characters

KEY = "extensions"
_PACKAGE = "hlat_extensions"
"""Name of the package of the modules in sys.modules."""
_MAX_DIFF_LINES = 20


@dataclass(frozen=True)
class Extension:
    """A loaded file."""

    path: str
    """Path as on the command line."""
    sha256: str
    """Hash of its content."""
    content: bytes
    """Content as it was executed."""

    @property
    def name(self) -> str:
        """Name of the file without suffix, which identifies the extension in a run."""
        return Path(self.path).stem

    @property
    def short_hash(self) -> str:
        """First digits of the hash, which identify the content in a run."""
        return self.sha256[:16]


_loaded: dict[str, Extension] = {}
"""Loaded extensions by name."""


def load_from_command_line(words: Iterable[str]) -> None:
    """Load the files that the word `extensions=[FILE,...]` of a command line names.

    Raises:
        ConfigError: A file cannot be read, fails, or registers nothing.
    """
    for word in words:
        if _names_files(word):
            for path in _parse_paths(word):
                load_extension(path, path)


def load_extension(file: str, path: str) -> Extension:
    """Execute a file, and return the extension; `path` is its path on the command line.

    A file that was loaded before is not executed again.

    Raises:
        ConfigError: The file cannot be read, fails or registers nothing, or another file with the
            same name was loaded.
    """
    name, setting = Path(path).stem, f"{KEY}={path}"
    try:
        content = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {error.strerror}; name a Python file") from error
    extension = Extension(path, hashlib.sha256(content).hexdigest(), content)
    if (loaded := _loaded.get(name)) is not None:
        if loaded.sha256 != extension.sha256:
            raise ConfigError(f"{setting}: {loaded.path} has the same name; rename one of them")
        return loaded
    if not name.isidentifier() or Path(path).suffix != ".py":
        raise ConfigError(
            f"{setting} needs a name of letters, digits and _ with suffix .py, such as my/idea.py"
        )
    before = components.list_registered()
    try:
        _execute(content, file, f"{_PACKAGE}.{name}")
        if components.list_registered() == before:
            raise ConfigError("it registers no component; call register_component")
    except Exception as error:
        components.remove_components(components.list_registered() - before)
        sys.modules.pop(f"{_PACKAGE}.{name}", None)
        raise ConfigError(f"{setting}: {_format_error(error, file)}") from error
    _loaded[name] = extension
    return extension


def list_loaded(paths: Iterable[str]) -> list[Extension]:
    """Return the loaded extensions of a configuration, given by path.

    Raises:
        ConfigError: A path was not named by the command line.
    """
    names = {path: Path(path).stem for path in paths}
    if missing := [path for path, name in names.items() if name not in _loaded]:
        raise ConfigError(
            f"{KEY}=[{','.join(missing)}] is set by a file, and Python code is loaded only from "
            "the command line; add the word to it"
        )
    return [_loaded[name] for name in names.values()]


def compute_hashes(paths: Iterable[str]) -> dict[str, str]:
    """Return the hash of each extension of a configuration by the key `extensions.<name>`."""
    return {f"{KEY}.{one.name}": one.short_hash for one in list_loaded(paths)}


def save_copies(directory: Path, paths: Iterable[str]) -> None:
    """Write the files of loaded extensions to `directory`; an earlier version keeps a copy."""
    for extension in list_loaded(paths):
        directory.mkdir(exist_ok=True)
        file = directory / f"{extension.name}.py"
        if file.exists() and (before := file.read_bytes()) != extension.content:
            digest = hashlib.sha256(before).hexdigest()[:8]
            file.replace(directory / f"{extension.name}.{digest}.py")
        file.write_bytes(extension.content)


def copy_to_submission(directory: Path, word: str) -> str:
    """Write the files that a word of a job's command names to the directory of its submission.

    Return the word of the copies. Other words are returned as they are.
    """
    if not _names_files(word):
        return word
    paths = _parse_paths(word)
    save_copies(directory / KEY, paths)
    copies = [str(directory.absolute() / KEY / Path(path).name) for path in paths]
    return f"{KEY}={json.dumps(copies, ensure_ascii=False)}"


def validate_job_files(words: Iterable[str], shares_file_system: bool) -> None:
    """Raise ConfigError if the command of a job names files that its machine does not have."""
    for word in words:
        if _names_files(word) and not shares_file_system:
            raise ConfigError(
                f"{word}: the job has no access to files of this machine; run the command here"
            )


def format_missing_extension(section: str, kind: str, config_yaml: str) -> str:
    """Return the error for a component of a run, given its configuration, that is not loaded."""
    lines = yaml.safe_load(config_yaml) if config_yaml else {}
    word = find_missing(lines.get(KEY) if isinstance(lines, dict) else None)
    if word is None:
        return components.format_unknown_kind(section, kind)
    key = f"{section}.{components.SELECTORS[section]}"
    return f"{key}={kind} is a component of an extension; add {word}"


def find_missing(recorded: Any) -> str | None:
    """Return the word `extensions=[FILE,...]` for the value that a run records, if not loaded."""
    paths = [str(path) for path in recorded] if isinstance(recorded, list) else []
    if all(Path(path).stem in _loaded for path in paths):
        return None
    return f"{KEY}=[{','.join(paths)}]"


def find_changed(recorded: Mapping[str, Any]) -> list[str]:
    """Return a message for each loaded extension whose hash differs from a recorded one by key."""
    return [
        f"{one.path} differs from the file of the same name that the run was trained with"
        for one in _loaded.values()
        if recorded.get(f"{KEY}.{one.name}", one.short_hash) != one.short_hash
    ]


def describe_changes(directory: Path, paths: Iterable[str]) -> list[str]:
    """Return a message with the changed lines of each extension that differs from its copy."""
    messages = []
    for extension in list_loaded(paths):
        file = directory / f"{extension.name}.py"
        if not file.exists() or file.read_bytes() == extension.content:
            continue
        before, now = (
            text.decode(errors="replace").splitlines()
            for text in (file.read_bytes(), extension.content)
        )
        lines = [
            escape_control_characters(line)
            for line in difflib.unified_diff(before, now, n=0, lineterm="")
            if not line.startswith(("---", "+++", "@@"))
        ]
        more = len(lines) - _MAX_DIFF_LINES
        shown = [*lines[:_MAX_DIFF_LINES], *([f"... {more} more lines"] if more > 0 else [])]
        messages.append(
            "\n    ".join([f"{extension.path} has changed since the last start:", *shown])
        )
    return messages


def _names_files(word: str) -> bool:
    """Return True for `extensions=...`, also with + as an override or -- as an option."""
    return word.lstrip("+-").startswith(f"{KEY}=")


def _parse_paths(word: str) -> Sequence[str]:
    """Return the paths of an override such as `extensions=[a.py,b.py]` or `extensions=a.py`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        override = OverridesParser.create().parse_override(word.removeprefix("--"))
        value: Any = override.value()
    except OverrideParseException as error:
        raise ConfigError(f"{word}: write {KEY}=[FILE,FILE]") from error
    paths = [value] if isinstance(value, str) else value
    if override.is_sweep_override() or not isinstance(paths, list):
        raise ConfigError(f"{word}: all runs of a sweep have the same files; write [FILE,FILE]")
    return [str(path) for path in paths]


def _execute(content: bytes, file: str, name: str) -> None:
    """Execute Python code as a module that `sys.modules` contains, as dataclasses require."""
    package = sys.modules.setdefault(_PACKAGE, types.ModuleType(_PACKAGE))
    package.__path__ = []
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = file
    code = compile(content, file, "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102  the command line names the file


def _format_error(error: Exception, file: str) -> str:
    """Return one line with the line of the file that raised an error."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = (message.splitlines() or [""])[0]
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{'' if line is None else f'line {line}: '}{kind}{text}"
