"""Filters of documents: by length, by language, and by functions in a file of the user.

A function gets the text of a document and returns the text to keep, changed or not, or None to
remove the document. Functions run in the processes that read the inputs.
"""

import hashlib
import runpy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError

NUM_REMOVED_SAMPLES = 2
"""Documents per filter and job whose beginning is kept for the report."""
MAX_SAMPLE_CHARACTERS = 200
MAX_LANGUAGE_CHARACTERS = 4096
"""Characters of a document from which its language is identified."""

_TextFilter = Callable[[str], str | None]


@dataclass(frozen=True)
class FunctionFilter:
    """A function in a file; `sha256` identifies the contents of the file."""

    path: str
    function: str
    sha256: str

    @property
    def name(self) -> str:
        """Name of the filter in the report."""
        return f"{Path(self.path).name}:{self.function}"


@dataclass(frozen=True)
class FilterSettings:
    """Filters, in the order in which they are applied."""

    min_chars: int | None = None
    max_chars: int | None = None
    languages: tuple[str, ...] = ()
    """Language codes of ISO 639-1 to keep; empty: all languages."""
    functions: tuple[FunctionFilter, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the settings of the command line that are set, and the functions with hashes."""
        functions = [f"{one.name} ({one.sha256[:12]})" for one in self.functions]
        settings = {
            "min_chars": self.min_chars,
            "max_chars": self.max_chars,
            "language": list(self.languages),
            "filters": functions,
        }
        return {name: value for name, value in settings.items() if value}


def parse_function_filters(texts: Sequence[str]) -> tuple[FunctionFilter, ...]:
    """Return the functions named by `FILE:FUNCTION`, after loading each once.

    Raises:
        ConfigError: If a file cannot be loaded, or has no such function.
    """
    filters = []
    for text in texts:
        path, colon, function = text.rpartition(":")
        if not colon or not function.isidentifier():
            raise ConfigError(f"filters={text}: is not FILE:FUNCTION, such as my_filters.py:clean")
        file = Path(path).expanduser().absolute()
        try:
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(
                f"filters={text}: {file} cannot be read ({error.strerror})"
            ) from error
        filters.append(FunctionFilter(str(file), function, sha256))
        _load_function(filters[-1])
    return tuple(filters)


def validate_language_library() -> None:
    """Raise ConfigError if the library that identifies languages is not installed."""
    try:
        import py3langid  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "language= needs the package py3langid; pip install 'hlat[prepare]'"
        ) from error


class DocumentFilter:
    """All filters of a job, with the number of removed documents and samples by filter."""

    def __init__(self, settings: FilterSettings) -> None:
        self._steps = [*_build_steps(settings)]
        self.removed: Counter[str] = Counter()
        self.samples: dict[str, list[str]] = {}

    def apply(self, document: bytes, location: str) -> bytes | None:
        """Return the document after all filters, or None if one of them removes it.

        Raises:
            ConfigError: If a function fails, or returns neither a string nor None.
        """
        if not self._steps:
            return document
        text = str(document, "utf-8")
        for name, step in self._steps:
            try:
                result = step(text)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ConfigError(f"{name} failed at {location} ({reason})") from error
            if result is None:
                self.removed[name] += 1
                samples = self.samples.setdefault(name, [])
                if len(samples) < NUM_REMOVED_SAMPLES:
                    samples.append(text[:MAX_SAMPLE_CHARACTERS])
                return None
            if not isinstance(result, str):
                raise ConfigError(
                    f"{name} returned {type(result).__name__} at {location}; return the text of "
                    "the document to keep it, or None to remove it"
                )
            text = result
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text after all filters is not UTF-8 at {location}") from error


def _build_steps(settings: FilterSettings) -> Iterator[tuple[str, _TextFilter]]:
    if settings.min_chars is not None:
        shortest = settings.min_chars
        yield f"min_chars={shortest}", lambda text: text if len(text) >= shortest else None
    if settings.max_chars is not None:
        longest = settings.max_chars
        yield f"max_chars={longest}", lambda text: text if len(text) <= longest else None
    if settings.languages:
        name = f"language={','.join(settings.languages)}"
        yield name, partial(_keep_language, languages=settings.languages)
    for function in settings.functions:
        yield function.name, _load_function(function)


def _keep_language(text: str, languages: tuple[str, ...]) -> str | None:
    import py3langid

    language, _ = py3langid.classify(text[:MAX_LANGUAGE_CHARACTERS])
    return text if language in languages else None


def _load_function(spec: FunctionFilter) -> _TextFilter:
    """Run the file of a function and return the function."""
    label = f"filters={spec.path}:{spec.function}"
    if hashlib.sha256(Path(spec.path).read_bytes()).hexdigest() != spec.sha256:
        raise ConfigError(f"{label}: the file has changed since the start; run the command again")
    try:
        names = runpy.run_path(spec.path)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{label}: the file cannot be loaded ({reason})") from error
    function = names.get(spec.function)
    if not callable(function):
        known = [name for name, value in names.items() if callable(value) and name[0] != "_"]
        raise ConfigError(
            f"{label}: the file has no such function; it has {', '.join(known) or 'none'}"
        )
    result: _TextFilter = function
    return result
