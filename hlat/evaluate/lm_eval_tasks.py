"""Tasks of lm-evaluation-harness, with data sets from the Hugging Face hub or a local directory.

The harness downloads its data sets. Nodes of a cluster are often offline, so a directory with one
subdirectory per data set, as `hf download` creates it, can replace the hub.
"""

import difflib
import hashlib
import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.evaluate.paper_tasks import TASK_SETS, TaskSpec, list_tasks


def validate_harness_installed() -> None:
    """Raise ConfigError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks= needs EleutherAI's lm-evaluation-harness, which is not installed; "
            "pip install 'hlat[evaluation]'"
        )


class TaskLoader:
    """Loader of tasks and their data sets, from a local directory or the Hugging Face hub.

    Raise ConfigError if the directory does not exist.
    """

    def __init__(self, datasets_dir: Path | None) -> None:
        if datasets_dir is not None and not datasets_dir.is_dir():
            raise ConfigError(
                f"data={datasets_dir} is not a directory; docs/evaluation.md lists its content"
            )
        self._datasets_dir = datasets_dir

    @cached_property
    def _task_manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager()  # slow, since it lists thousands of tasks

    def resolve_tasks(self, names: Sequence[str], shots: int | None) -> list[TaskSpec]:
        """Return the tasks of task sets, and other tasks or groups of the harness, by name.

        `shots` are the few-shot examples of the latter; None: the default of each task. Raise
        ConfigError with the closest match if a task does not exist.
        """
        specs: dict[str, TaskSpec] = {}
        problems = []
        for name in dict.fromkeys(names):
            if name in TASK_SETS:
                specs.update({spec.name: spec for spec in list_tasks([name])})
                continue
            tasks = self._task_manager.all_tasks
            if name in tasks:
                specs.setdefault(name, TaskSpec(name, shots, ""))
                continue
            matches = difflib.get_close_matches(name, [*TASK_SETS, *tasks], 1)
            hint = f"did you mean {matches[0]}?" if matches else f"use {', '.join(TASK_SETS)}"
            problems.append(
                f"tasks={name}: the harness has no such task; {hint} "
                "(python -m lm_eval ls tasks lists all)"
            )
        if problems:
            raise ConfigError(*problems)
        return [*specs.values()]

    def load_task(self, spec: TaskSpec) -> Any:
        """Return a task or group with its data in the format of the harness's evaluator.

        Some tasks shuffle their questions or choices while they load, so the random generators are
        seeded first, as by the harness before it loads the tasks of a call.

        Raises:
            ConfigError: The data cannot be loaded, or the task sets an unsupported option.
        """
        from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

        from hlat.evaluate.lm_eval_adapter import validate_generation_settings

        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        with self._redirect_datasets(spec.name):
            loaded = self._task_manager.load([spec.name])
        for task in loaded["tasks"].values():
            if spec.shots is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=spec.shots)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            if task.OUTPUT_TYPE == "generate_until":
                with _prefix_problems(spec.name):
                    validate_generation_settings(task.get_config("generation_kwargs") or {})
        return loaded

    @contextmanager
    def _redirect_datasets(self, task: str) -> Iterator[None]:
        """Load data sets from the local directory, and convert errors to ConfigError."""
        import datasets

        load_dataset = datasets.load_dataset
        requested: list[str] = []

        def load_local(path: str, name: str | None = None, **options: Any) -> Any:
            requested.append(path)
            if self._datasets_dir is None:
                return load_dataset(path, name, **options)
            dataset_dir = self._datasets_dir / path
            if not dataset_dir.is_dir():
                raise FileNotFoundError(f"{dataset_dir} does not exist")
            cache_dir = _compute_cache_dir(dataset_dir)
            return load_dataset(str(dataset_dir), name, cache_dir=cache_dir, **options)

        datasets.load_dataset = load_local
        try:
            yield
        except Exception as error:  # data set loaders raise exceptions of many libraries
            if not requested:
                raise
            reason = (str(error).strip().splitlines() or [repr(error)])[0]
            data, name = self._datasets_dir or "DATA", requested[-1]
            raise ConfigError(
                f"{task}: its data set {name} cannot be loaded ({reason}); on a machine with "
                f"internet access: hf download {name} --repo-type dataset --local-dir "
                f"{data}/{name}, and then here data={data}"
            ) from error
        finally:
            datasets.load_dataset = load_dataset


@contextmanager
def _prefix_problems(task: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{task}: {problem}" for problem in error.problems)) from error


def _compute_cache_dir(dataset_dir: Path) -> str:
    """Return the cache directory of the datasets library for a local data set.

    The library's key does not depend on the location of the directory and the content of its files,
    so that one copy could get the cached content of another.
    """
    import datasets

    files = [path for path in sorted(dataset_dir.rglob("*")) if path.is_file()]
    stats = [(str(path.resolve()), path.stat()) for path in files]
    key = repr([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
    return str(Path(datasets.config.HF_DATASETS_CACHE, hashlib.sha256(key.encode()).hexdigest()))
