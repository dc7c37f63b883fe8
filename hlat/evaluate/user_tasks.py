"""Tasks of the user, in YAML files of lm-evaluation-harness.

A file may name Python functions, which the harness imports. Paths of files and directories are
therefore given on the command line only, and never read from a configuration.
"""

import dataclasses
import difflib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError, raise_config_errors

_TASK_FILE_SUFFIXES = (".yaml", ".yml")
_STRUCTURAL_KEYS = {"class", "group", "include", "tag", "task_list"}
"""Keys of a file that the harness removes before it creates the task."""
_DATA_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml")
"""Values of dataset_path that read the files of dataset_kwargs."""
_KEYS_BY_FUNCTION = {
    "load_local": "dataset_path or dataset_kwargs",
    "training_docs": "training_split",
    "validation_docs": "validation_split",
    "test_docs": "test_split",
    "fewshot_docs": "fewshot_split",
    "get_metric": "metric_list",
    "get_aggregation": "metric_list",
    "build_filter_ensemble": "filter_list",
}
"""Keys of a task by the function of the harness, or of this package, that uses them."""


def is_task_file(name: str) -> bool:
    """Return True if the name of a task is the path of a YAML file."""
    return name.endswith(_TASK_FILE_SUFFIXES)


def is_local_data(dataset_path: str) -> bool:
    """Return True if dataset_path is a format of local files, or a local path."""
    return dataset_path in _DATA_FORMATS or dataset_path.startswith((".", "/"))


class UserTasks:
    """Tasks in a directory, and in single files.

    Raise ConfigError if the directory does not exist.
    """

    def __init__(self, include_path: Path | None) -> None:
        if include_path is not None and not include_path.is_dir():
            raise ConfigError(
                f"include_path={include_path} is not a directory; give one with YAML files of tasks"
            )
        self.include_path = include_path
        self.files: dict[str, str] = {}
        """Paths of single files by the name of the task."""
        self._configs: dict[str, dict[str, Any]] = {}

    @cached_property
    def _manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        user_dir = None if self.include_path is None else str(self.include_path)
        return TaskManager(include_path=user_dir, include_defaults=False)

    def __contains__(self, name: str) -> bool:
        """Return True if the directory has a task, group or tag of this name."""
        return name in self.list_names()

    def list_names(self) -> list[str]:
        """Return the names of the tasks, groups and tags in the directory."""
        return [*self._manager.task_index] if self.include_path is not None else []

    def add_file(self, location: str) -> str:
        """Return the name of the task or group in a file."""
        path = Path(location).expanduser().absolute()
        try:
            config = _load_yaml(path)
        except Exception as error:  # the harness raises exceptions of many types
            raise ConfigError(f"tasks={location}: {_format_error(error)}") from error
        name = config.get("group") or config.get("task")
        if not isinstance(name, str):
            raise ConfigError(
                f"tasks={location}: the file has no key task with the name of the task; add it"
            )
        self.files[name], self._configs[name] = str(path), config
        return name

    def find_unreadable_files(self) -> list[str]:
        """Return the problem of each file of the directory that the harness cannot read."""
        problems = []
        for path in sorted(self.include_path.rglob("*.yaml")) if self.include_path else ():
            try:
                _load_yaml(path)
            except Exception as error:  # the harness raises exceptions of many types
                problems.append(f"{path} cannot be read: {_format_error(error)}")
        return problems

    def validate_unused(self, task_set: str, names: Sequence[str]) -> None:
        """Raise ConfigError if a task of a task set is defined again."""
        if again := [name for name in names if name in self]:
            raise ConfigError(
                f"tasks={task_set}: include_path={self.include_path} defines {', '.join(again)} "
                f"again; rename it, since {task_set} has the harness's tasks"
            )

    def get_manager(self, name: str) -> Any | None:
        """Return a manager with the tasks of the user only, if it suffices for a task.

        It is None for groups, which may contain tasks of the harness, and for other tasks.
        """
        config = self._get_config(name)
        return None if config is None or "group" in config else self._manager

    @contextmanager
    def translate_errors(self, name: str) -> Iterator[None]:
        """Raise ConfigError with file and key if the task of a file cannot be loaded."""
        config = self._get_config(name)
        if config is None:
            yield
            return
        file = self.files.get(name) or self._manager.task_index[name].yaml_path or self.include_path
        raise_config_errors(f"{file}: {problem}" for problem in _find_config_problems(config))
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # also those of the user's functions
            key = _find_key(error)
            where = f"{key}: " if key else ""
            raise ConfigError(
                f"{file}: {where}{_format_error(error)}; correct {key or 'the file'}"
            ) from error

    def _get_config(self, name: str) -> dict[str, Any] | None:
        if name in self._configs:
            return self._configs[name]
        return (self._manager.task_index[name].cfg or {}) if name in self else None


def _load_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a file and those that it includes, without importing functions."""
    from lm_eval.tasks._yaml_loader import load_yaml

    content: dict[str, Any] = load_yaml(path, resolve_func=False)
    return content


def _list_task_keys() -> list[str]:
    from lm_eval.config.task import TaskConfig

    return [field.name for field in dataclasses.fields(TaskConfig)]


def _find_config_problems(config: dict[str, Any]) -> list[str]:
    """Return the unknown keys and metrics of a task; groups and Python tasks have other keys."""
    if "group" in config or "class" in config:
        return []
    known = _list_task_keys()
    unknown = sorted(map(str, config.keys() - {*known, *_STRUCTURAL_KEYS}))
    problems = [f"{key} is not a key of a task; {_suggest(key, known)}" for key in unknown]
    return problems + ([] if config.get("process_results") else _find_metric_problems(config))


def _find_metric_problems(config: dict[str, Any]) -> list[str]:
    """Return the unknown metrics, which the harness would look for on the Hugging Face hub."""
    import lm_eval.api.metrics  # noqa: F401 (registers the metrics)
    from lm_eval.api.registry import metric_registry

    known = [str(name) for name in metric_registry]
    return [
        f"metric_list: the harness has no metric {row['metric']}; {_suggest(row['metric'], known)}"
        for row in config.get("metric_list") or ()
        if isinstance(row, dict)
        and not row.get("hf_evaluate")
        and isinstance(row.get("metric"), str)
        and "/" not in row["metric"]  # the path of a function
        and row["metric"] not in known
    ]


def _suggest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, 1)
    return f"did you mean {matches[0]}?" if matches else f"use one of {', '.join(known)}"


def _find_key(error: Exception) -> str:
    """Return the key of the task that caused an error, or an empty string."""
    keys = {key: key for key in _list_task_keys()} | _KEYS_BY_FUNCTION
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return next((keys[name] for name in reversed(names) if name in keys), "")


def _format_error(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(f"{type(error).__name__}: {error}".split())
