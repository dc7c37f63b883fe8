"""Tasks of lm-evaluation-harness, with data sets from the Hugging Face hub or a local directory.

The harness downloads its data sets. Nodes of a cluster are often offline, so a directory with one
subdirectory per data set, as `hf download` creates it, can replace the hub.
"""

import difflib
import hashlib
import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.evaluate.harness_settings import HarnessSettings, validate_generation_settings
from hlat.evaluate.paper_tasks import TASK_SETS, TaskSpec, list_tasks
from hlat.evaluate.user_tasks import UserTasks, is_local_data, is_task_file


def validate_harness_installed() -> None:
    """Raise ConfigError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks= needs EleutherAI's lm-evaluation-harness, which is not installed; "
            "pip install 'hlat[evaluation]'"
        )


class TaskLoader:
    """Loader of tasks and their data sets, from a local directory or the Hugging Face hub.

    Tasks in `include_path` replace those of the harness with the same name. Raise ConfigError if a
    directory does not exist.
    """

    def __init__(
        self,
        datasets_dir: Path | None,
        include_path: Path | None = None,
        settings: HarnessSettings | None = None,
    ) -> None:
        if datasets_dir is not None and not datasets_dir.is_dir():
            raise ConfigError(
                f"data={datasets_dir} is not a directory; docs/evaluation.md lists its content"
            )
        self._datasets_dir, self._settings = datasets_dir, settings or HarnessSettings()
        self._user_tasks = UserTasks(include_path)

    @cached_property
    def _task_manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        user_dir = self._user_tasks.include_path
        if user_dir is None:
            return TaskManager()  # slow, since it lists thousands of tasks
        return TaskManager(include_path=str(user_dir))

    def resolve_tasks(self, names: Sequence[str], shots: int | None) -> list[TaskSpec]:
        """Return the tasks of task sets, and other tasks or groups, by name.

        A name may be the path of a YAML file. `shots` are the few-shot examples of tasks outside
        task sets; None: the default of each task. Raise ConfigError with the closest match if a
        task does not exist.
        """
        specs: dict[str, TaskSpec] = {}
        problems: list[str] = []
        for name in dict.fromkeys(names):
            try:
                specs.update({spec.name: spec for spec in self._resolve_name(name, shots, specs)})
            except ConfigError as error:
                problems += error.problems
        raise_config_errors(problems)
        return [*specs.values()]

    def _resolve_name(
        self, name: str, shots: int | None, specs: Mapping[str, TaskSpec]
    ) -> list[TaskSpec]:
        if name in TASK_SETS:
            set_specs = list_tasks([name])
            self._user_tasks.validate_unused(name, [spec.name for spec in set_specs])
            return set_specs
        if is_task_file(name):
            name = self._user_tasks.add_file(name)
        elif name not in self._user_tasks and name not in self._task_manager.all_tasks:
            raise ConfigError(self._format_unknown_task(name))
        return [specs.get(name, TaskSpec(name, shots, ""))]

    def _format_unknown_task(self, name: str) -> str:
        known = [*TASK_SETS, *self._task_manager.all_tasks]
        matches = [
            match
            for names in (self._user_tasks.list_names(), known)
            for match in difflib.get_close_matches(name, names, 1)
        ]
        hint = (
            f"did you mean {' or '.join(dict.fromkeys(matches))}?"
            if matches
            else f"use {', '.join(TASK_SETS)}"
        )
        user_dir = self._user_tasks.include_path
        problem = "the harness has no such task"
        if user_dir is not None:
            problem = "; ".join(
                [
                    f"neither the harness nor include_path={user_dir} has such a task",
                    *self._user_tasks.find_unreadable_files(),
                ]
            )
        return f"tasks={name}: {problem}; {hint} (python -m lm_eval ls tasks lists all)"

    def load_task(self, spec: TaskSpec) -> Any:
        """Return a task or group with its data in the format of the harness's evaluator.

        Some tasks shuffle their questions or choices while they load, so the random generators are
        seeded first, as by the harness before it loads the tasks of a call.

        Raises:
            ConfigError: The data cannot be loaded, or the task sets an unsupported option.
        """
        settings = self._settings
        random.seed(settings.seed[0])
        np.random.seed(settings.seed[1])
        with self._redirect_datasets(spec.name), self._user_tasks.translate_errors(spec.name):
            manager = self._user_tasks.get_manager(spec.name) or self._task_manager
            loaded = manager.load([self._user_tasks.files.get(spec.name, spec.name)])
        for name, task in loaded["tasks"].items():
            _validate_supported(name, task)
            if spec.shots is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=spec.shots)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=settings.seed[3])
            _validate_shots(name, task)
            if name in settings.doc_ids:
                _validate_doc_ids(name, settings.doc_ids[name], len(task.eval_docs))
            if task.OUTPUT_TYPE == "generate_until":
                with _prefix_problems(spec.name):
                    _update_generation_settings(task, settings.gen_kwargs)
        return loaded

    @contextmanager
    def _redirect_datasets(self, task: str) -> Iterator[None]:
        """Load data sets from the local directory, and convert errors to ConfigError."""
        import datasets

        load_dataset = datasets.load_dataset
        requested: list[str] = []

        def load_local(path: str, name: str | None = None, **options: Any) -> Any:
            requested.append(path)
            if self._datasets_dir is None or is_local_data(path):
                return load_dataset(path, name, **options)
            dataset_dir = self._datasets_dir / path
            if not dataset_dir.is_dir():
                raise FileNotFoundError(f"{dataset_dir} does not exist")
            cache_dir = _compute_cache_dir(dataset_dir)
            return load_dataset(str(dataset_dir), name, cache_dir=cache_dir, **options)

        datasets.load_dataset = load_local
        try:
            yield
        except ConfigError:
            raise
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


def _validate_supported(name: str, task: Any) -> None:
    """Raise ConfigError if a task executes generated code, or has images or sound."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"{name} executes code that the model wrote, without a sandbox (unsafe_code); leave it "
            "out, or use tasks=humaneval (docs/humaneval.md)"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"{name} has images or sound, which hlat's models cannot read; remove it")


def _validate_shots(name: str, task: Any) -> None:
    """Raise ConfigError if a task has fewer documents than few-shot examples of a prompt."""
    shots, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if not shots or sampler is None:
        return
    is_evaluated = task.fewshot_cfg.split == task.config.test_split  # then one is the question
    available = len(sampler.fewshot_docs()) - is_evaluated
    if shots > available:
        raise ConfigError(
            f"shots={shots} exceeds the {available} documents of {name} that are available as "
            f"few-shot examples; use shots={available} or less"
        )


def _validate_doc_ids(name: str, ids: Sequence[int], num_documents: int) -> None:
    if ids[-1] >= num_documents:
        raise ConfigError(
            f"doc_ids={{{name}: ...}} has the index {ids[-1]}, and the task has {num_documents} "
            f"documents; use indices from 0 to {num_documents - 1}"
        )


def _update_generation_settings(task: Any, changes: Mapping[str, Any]) -> None:
    """Replace settings of generation of a task; raise ConfigError if they are not supported."""
    if changes:
        task.set_config("generation_kwargs", dict(changes), update=True)
    settings = task.get_config("generation_kwargs") or {}
    validate_generation_settings(settings)
    if changes.get("temperature") and settings.get("do_sample") is False:
        raise ConfigError(
            f"gen_kwargs: temperature={changes['temperature']} has no effect, since the task has "
            "do_sample=false; add do_sample=true"
        )


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
