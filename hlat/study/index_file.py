"""Index of the runs below a root: a SQLite file that repeats the content of run directories.

The file is a cache. It is replaced as a whole, like every other file of a run, so that several
processes and machines can read and write it on a shared file system without locks, which network
file systems do not guarantee. Of two writers at the same time, one wins; the runs that only the
other one had read are read again the next time. A damaged file is ignored and replaced.

A user who may not write to the root has a second file in the cache directory, with the runs that
the first one lacks.
"""

import difflib
import hashlib
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from hlat.config.config_errors import ConfigError
from hlat.config.renamed_keys import RENAMED_KEYS, rename_settings
from hlat.data.data_cache import get_cache_dir
from hlat.study.run_row import CONFIG_PREFIX, RunRow, Settings, build_run_row, is_ended
from hlat.tracking import finished_runs

INDEX_NAME = ".hlat_runs.sqlite"
"""Name of the index in the root."""
_TABLES = {
    "run": "CREATE TABLE run (path TEXT PRIMARY KEY, version TEXT, fields BLOB) WITHOUT ROWID",
    "settings": "CREATE TABLE settings (path TEXT PRIMARY KEY, fields BLOB) WITHOUT ROWID",
}
"""Statement of each table. The file may come from others, so that other statements, such as a view
that never ends, are not executed."""
_RUN_FILES = ("events.jsonl", "metrics.jsonl", "config.yaml", "provenance.json")
_MAX_DEPTH = 3
"""Levels of directories in which runs are searched; a run.name may contain slashes."""


@dataclass(frozen=True)
class RunList:
    """Runs below a root in the order of their paths; settings are loaded when they are needed."""

    root: Path
    rows: list[RunRow]
    fresh_settings: dict[str, Settings] = field(default_factory=dict)

    @cached_property
    def settings(self) -> list[Settings]:
        """Settings of each run by full key."""
        paths = [row["run"] for row in self.rows]
        missing = [path for path in paths if path not in self.fresh_settings]
        stored = _load_tables(self.root, "settings") if missing else {}
        loaded = {path: rename_settings(fields) for path, (fields,) in stored.items()}
        loaded |= self.fresh_settings
        for path in paths:
            if path not in loaded:  # another process has replaced the index since
                loaded[path] = build_run_row(self.root / path, self.root)[1]
        return [loaded[path] for path in paths]

    def select(self, indices: Iterable[int]) -> "RunList":
        """Return the runs at `indices`."""
        return RunList(self.root, [self.rows[i] for i in indices], self.fresh_settings)

    def drop_copies(self) -> "RunList":
        """Return the runs without copies of others among them."""
        return self.select(finished_runs.find_distinct(self.rows))


def load_run_list(root: Path, rebuild: bool = False) -> RunList:
    """Return the runs below a root; read those that are not in the index, and add them to it.

    Args:
        root: Directory of runs.
        rebuild: Ignore the index, and write it again.

    Raises:
        ConfigError: The root does not exist.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory; give the root of the runs, such as runs")
    tables = [{} if rebuild else _load_table(file, "run") for file in list_index_files(root)]
    stored = tables[0] | tables[1]
    rows: list[RunRow] = []
    fresh: dict[str, tuple[str, RunRow, Settings]] = {}
    unreadable: list[str] = []
    for path, version in sorted(_find_runs(str(root), unreadable)):
        known_version, row = stored.get(path, (None, {}))
        if known_version == version and row.get("run") == path and is_ended(row):
            rows.append(row)
            continue
        try:
            row, settings = build_run_row(root / path, root)
        except ConfigError:  # without a readable row, or removed since
            if _is_unreadable(root / path):
                unreadable.append(str(root / path))
            continue
        rows.append(row)
        fresh[path] = version, row, settings
    ended = {path: item for path, item in fresh.items() if is_ended(item[1])}
    if unreadable:
        text = f"unreadable directories ({len(unreadable):,}), such as {min(unreadable)}"
        print(f"hlat: skipped {text}", file=sys.stderr)
    paths = {row["run"] for row in rows}
    for file, table in zip(list_index_files(root), tables, strict=True):
        removed = {path for path in table.keys() - paths if not os.path.lexists(root / path)}
        if not (ended or removed or rebuild):
            break
        if _replace_index(file, root, ended, removed, from_scratch=not table):
            break
    return RunList(root, rows, {path: settings for path, (_, _, settings) in fresh.items()})


def list_index_files(root: Path) -> tuple[Path, Path]:
    """Return the index in the root, and that of users who may not write to the root."""
    digest = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return root / INDEX_NAME, get_cache_dir() / "runs" / f"{digest}.sqlite"


def resolve_columns(runs: RunList, columns: Sequence[str]) -> list[str]:
    """Return the full names of columns; `config.KEY` is a setting, which may lack the prefix.

    As in an override, the name of a group is that of its choice: `precision`.

    Raises:
        ConfigError: No run has one of the columns.
    """
    results = {key for row in runs.rows for key in row}
    if not runs.rows or results.issuperset(columns):
        return [*columns]
    settings = {f"{CONFIG_PREFIX}{key}" for settings in runs.settings for key in settings}
    return [_resolve_column(column, results, settings) for column in columns]


def _resolve_column(column: str, results: set[str], settings: set[str]) -> str:
    key = column.removeprefix(CONFIG_PREFIX)
    column = f"{CONFIG_PREFIX}{RENAMED_KEYS[key]}" if key in RENAMED_KEYS else column
    candidates = (column, f"{CONFIG_PREFIX}{column}", f"{CONFIG_PREFIX}{column}.name")
    for name in candidates:
        if name in results or name in settings:
            return name
    near = [key for key in sorted(settings) if key.endswith(f".{column}")]
    near = near or difflib.get_close_matches(column, results | settings, 1, 0.7)
    near = near or difflib.get_close_matches(candidates[1], settings, 1, 0.7)
    hint = f"did you mean {near[0]}?" if near else f"columns: {', '.join(sorted(results))}, "
    rest = "" if near else "and config.KEY for a setting, such as config.optimizer.lr"
    raise ConfigError(f"{column}: no run has this column; {hint}{rest}")


def _find_runs(
    directory: str, unreadable: list[str], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the path of each run below a directory, with the version of its files.

    Directories that this user may not read are added to `unreadable`.
    """
    if not os.access(directory, os.R_OK | os.X_OK):
        unreadable.append(directory)
        return
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            path = f"{prefix}{entry.name}"
            if version := _get_version(entry.path):
                yield path, version
            elif depth + 1 < _MAX_DEPTH:
                yield from _find_runs(entry.path, unreadable, f"{path}/", depth + 1)


def _get_version(run_dir: str) -> str:
    """Return modification time and size of the files of a run; empty if it has none."""
    parts = []
    for name in _RUN_FILES:
        try:
            status = os.stat(f"{run_dir}/{name}")
        except OSError:
            continue
        parts.append(f"{name[0]}{status.st_mtime_ns}:{status.st_size}")
    return " ".join(parts)


def _is_unreadable(run_dir: Path) -> bool:
    """Return True if this user may not read one of the files of a run."""
    files = [run_dir / name for name in _RUN_FILES]
    return any(os.path.exists(file) and not os.access(file, os.R_OK) for file in files)


def _load_tables(root: Path, table: str) -> dict[str, tuple[Any, ...]]:
    shared, private = (_load_table(file, table) for file in list_index_files(root))
    return shared | private


def _load_table(file: Path, table: str) -> dict[str, tuple[Any, ...]]:
    """Return the rows of a table by path, with their fields parsed.

    Empty if the file is missing, of another version, damaged, or unreadable for this user.
    """
    if not file.is_file() or not os.access(file, os.R_OK):
        return {}
    try:
        # Immutable: SQLite takes no lock, since the file is replaced and never changed
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?immutable=1", uri=True)) as index:
            query = "SELECT sql FROM sqlite_master WHERE name=?"
            if index.execute(query, (table,)).fetchall() != [(_TABLES[table],)]:
                return {}
            rows = index.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608
        parsed = {path: (*rest, orjson.loads(fields)) for path, *rest, fields in rows}
    except (sqlite3.Error, ValueError, TypeError, OSError) as error:
        print(f"hlat: {file} is damaged ({error}); it is written again", file=sys.stderr)
        return {}
    return {path: row for path, row in parsed.items() if isinstance(row[-1], dict)}


def _replace_index(
    file: Path,
    root: Path,
    fresh: dict[str, tuple[str, RunRow, Settings]],
    removed: Iterable[str],
    from_scratch: bool,
) -> bool:
    """Replace an index with a copy that has the fresh runs; return False if it is not writable."""
    is_shared = file.parent == root
    try:
        if not is_shared:
            file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"{INDEX_NAME}.", dir=file.parent)
        os.close(descriptor)
    except OSError:
        return False
    try:
        if not from_scratch:
            shutil.copyfile(file, name)
        with closing(sqlite3.connect(name)) as index:
            index.execute("PRAGMA journal_mode=OFF")  # the file is private until it is complete
            index.execute("PRAGMA synchronous=OFF")
            if from_scratch:
                for statement in _TABLES.values():
                    index.execute(statement)
            gone = [(path,) for path in removed]
            index.executemany("DELETE FROM run WHERE path=?", gone)
            index.executemany("DELETE FROM settings WHERE path=?", gone)
            runs = [(path, v, _serialize(row)) for path, (v, row, _) in fresh.items()]
            settings = [(path, _serialize(each)) for path, (_, _, each) in fresh.items()]
            index.executemany("REPLACE INTO run VALUES (?, ?, ?)", runs)
            index.executemany("REPLACE INTO settings VALUES (?, ?)", settings)
            index.commit()
        if is_shared:
            os.chmod(name, (root.stat().st_mode & 0o666) | 0o600)  # for all users of the root
        os.replace(name, file)
    except PermissionError:  # the file of another user, in a directory with the sticky bit
        os.unlink(name)
        return False
    except (OSError, sqlite3.Error) as error:
        print(f"hlat: {file} cannot be written ({error})", file=sys.stderr)
        with suppress(OSError):
            os.unlink(name)
        return False
    if not is_shared:
        print(f"hlat: {root} is not writable; the index is {file}", file=sys.stderr)
    return True


def _serialize(fields: dict[str, Any]) -> bytes:
    """Return JSON, also of values of a foreign configuration that orjson rejects."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        return json.dumps(fields, default=str).encode()
