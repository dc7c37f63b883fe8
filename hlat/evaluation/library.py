"""The harness's tasks by name, with the questions from wherever the user has them.

The harness downloads its data sets. A cluster's nodes have no way out, so a folder of copies does
as well: each data set of the hub in a folder of its name, as `hf download` leaves it.
"""

import difflib
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.evaluation.tasks import SETS, Item

SEED = 1234
"""Of the examples before a question (the harness's own default)."""


def refuse_missing() -> None:
    """Return if the harness is installed.

    Raises:
        ConfigError: It is not; with what to install.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks= needs EleutherAI's lm-evaluation-harness, which is not installed; "
            "pip install 'hlat[evaluation]'"
        )


class Library:
    """The tasks that there are.

    Args:
        data: Folder of copies of data sets; None: the harness loads them.
    """

    def __init__(self, data: Path | None) -> None:
        if data is not None and not data.is_dir():
            raise ConfigError(f"data={data} is no folder; docs/evaluation.md tells what is in it")
        self._data = data

    @cached_property
    def _manager(self) -> Any:
        """The harness's own, which reads the names of thousands of tasks before it is there."""
        from lm_eval.tasks import TaskManager

        return TaskManager()

    def choose(self, names: Sequence[str], shots: int | None) -> list[Item]:
        """The tasks that names stand for.

        Args:
            names: Sets of the paper's tasks, or tasks and groups of the harness.
            shots: Examples before each question of the harness's; the paper's have their own.

        Raises:
            ConfigError: There is no such task; with the nearest.
        """
        chosen: dict[str, Item] = {}
        problems = []
        for name in dict.fromkeys(names):
            if name in SETS:
                from hlat.evaluation.tasks import items

                chosen.update({item.task: item for item in items([name])})
            elif name in self._manager.all_tasks:
                chosen.setdefault(name, Item(name, shots, ""))
            else:
                near = difflib.get_close_matches(name, [*SETS, *self._manager.all_tasks], 1)
                meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(SETS)}"
                problems.append(
                    f"tasks={name}: the harness has no such task; {meant} "
                    "(python -m lm_eval ls tasks lists all)"
                )
        if problems:
            raise ConfigError(*problems)
        return [*chosen.values()]

    def load(self, item: Item) -> Any:
        """A task or group with its data, as the harness evaluates it.

        Raises:
            ConfigError: Its data set is neither in the folder nor within reach.
        """
        with self._loading(item.task):
            loaded = self._manager.load([item.task])
        for task in loaded["tasks"].values():
            if item.shots is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=item.shots)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        return loaded

    @contextmanager
    def _loading(self, task: str) -> Iterator[None]:
        """Let the harness find data sets in the folder, and say of one that it does not find."""
        import datasets

        load = datasets.load_dataset
        asked: list[str] = []

        def local(path: str, name: str | None = None, **options: Any) -> Any:
            asked.append(path)
            if self._data is None:
                return load(path, name, **options)
            if not (self._data / path).is_dir():
                raise FileNotFoundError(f"{self._data / path} is not there")
            folder = self._data / path
            return load(str(folder), name, cache_dir=_cache(folder), **options)

        datasets.load_dataset = local
        try:
            yield
        except Exception as error:  # every loader raises what its library does
            if not asked:
                raise
            raise self._missing(task, asked[-1], error) from error
        finally:
            datasets.load_dataset = load

    def _missing(self, task: str, dataset: str, error: Exception) -> ConfigError:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        data = "DATA" if self._data is None else str(self._data)
        return ConfigError(
            f"{task}: its data set {dataset} cannot be loaded ({reason}); where there is a way to "
            f"the hub: hf download {dataset} --repo-type dataset --local-dir {data}/{dataset}, and "
            f"then here data={data}"
        )


def _cache(folder: Path) -> str:
    """Where the datasets library keeps what it makes of a folder.

    Its own key knows neither where the folder is nor what is in its files, so that it would answer
    for one copy with what it has read from another.
    """
    import datasets

    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    stats = [(str(path.resolve()), path.stat()) for path in files]
    told = repr([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
    return str(Path(datasets.config.HF_DATASETS_CACHE, hashlib.sha256(told.encode()).hexdigest()))
