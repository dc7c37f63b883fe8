"""Searches: each trial's settings are chosen by what those before it came to.

Optuna chooses, the launcher of this machine trains, and what a trial came to is read from its run's
folder: that is where it still is when the process that asked has been killed
(docs/adr/0034-a-search-reads-run-folders.md).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hlat.config.errors import ConfigError, Exit
from hlat.tracking import sweep
from hlat.tracking.journal import Journal
from hlat.tracking.totals import totals

from ._local import LocalLauncher
from ._points import entry

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

_FILE = "search.journal"
_ASKED = "asked"
"""What the search was asked for, among the study's attributes."""


@dataclass
class SearchConfig:
    """How a search goes about it."""

    _target_: str = "hydra_plugins.hlat_launchers._search.Search"
    params: dict[str, str] = field(default_factory=dict)
    """What is searched, by key: interval(a,b), tag(log,interval(a,b)), or values."""
    trials: int = 16
    """Trials in all, those of an interrupted search and those that diverge included."""
    seed: int = 1
    """Of the choices."""


ConfigStore.instance().store(
    group="hydra/sweeper", name="search", node=SearchConfig, provider="hlat"
)


class Search(Sweeper):
    """Hydra sweeper that minimises the held-out bits per byte at the end of a run."""

    def __init__(self, params: Mapping[str, str], trials: int, seed: int) -> None:
        self.params, self.trials, self.seed = params, trials, seed

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember what is searched.

        Raises:
            ConfigError: Optuna is not installed, nobody would wait for the trials, or they do not
                train.
        """
        if find_spec("optuna") is None:
            raise ConfigError(
                "hydra/sweeper=search needs optuna; install it with pip install 'hlat[search]'"
            )
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        chosen = config.hydra.runtime.choices["hydra/launcher"]
        if not isinstance(self.launcher, LocalLauncher):
            raise ConfigError(
                f"hydra/launcher={chosen} does not wait for a trial, and a search needs what it "
                "came to; use hydra/launcher=local, on a node of the cluster if need be"
            )
        if (swept := entry(task_function)) != "train":
            raise ConfigError(
                f"hydra/sweeper=search is for hlat.train, and hlat.{swept} trains nothing"
            )
        self.at_once = self.launcher.settings.jobs
        self.folder = Path(config.hydra.sweep.dir)
        self.parser = OverridesParser.create(config_loader=hydra_context.config_loader)

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until there have been as many as asked for, and tell the best.

        Trials that an earlier process has begun and not ended come first, with their settings.

        Raises:
            ConfigError: There is nothing to search, or the folder holds another search.
            SystemExit: A trial neither finished nor diverged; with its exit code.
        """
        words = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        swept = {word.get_key_element(): word for word in self.parser.parse_overrides(words)}
        space = {key: axis(word) for key, word in swept.items() if word.is_sweep_override()}
        if not space:
            raise ConfigError(
                "a search needs an axis; set one, as in optimizer.lr=interval(1e-4,1e-2)"
            )
        fixed = [str(word.input_line) for word in swept.values() if not word.is_sweep_override()]
        study = opened(self.folder, words)
        while begun := _unfinished(study) or self._ask(study, space):
            trials = study.get_trials(deepcopy=False)
            points = {
                number: [
                    *fixed,
                    *(f"{key}={value}" for key, value in trials[number].params.items()),
                ]
                for number in begun
            }
            self._run(study, points)
        _tell(study)

    def _ask(self, study: "Study", space: Mapping[str, "BaseDistribution"]) -> list[int]:
        """Choose the next trials, as many as may run at once; return their numbers.

        A choice depends on its number and on the trials before it only, so that a search which was
        interrupted goes on as it would have.
        """
        from optuna.samplers import TPESampler

        first = len(study.get_trials(deepcopy=False))
        numbers = [*range(first, min(first + self.at_once, self.trials))]
        for number in numbers:
            study.sampler = TPESampler(seed=self.seed + number)
            study.ask({**space})
        return numbers

    def _run(self, study: "Study", points: Mapping[int, Sequence[str]]) -> None:
        """Run trials, and tell the study what they came to; two that are alike run once.

        Raises:
            ConfigError: One left nothing to compare.
            SystemExit: One neither finished nor diverged; with its exit code.
        """
        different = [*dict.fromkeys(map(tuple, points.values()))]
        ended = None
        try:
            self.launcher.launch(different, initial_job_idx=min(points))
        except SystemExit as end:
            ended = end
        for number, point in points.items():
            _conclude(study, number, sweep.run_folder(self.folder, point))
        if ended and ended.code != Exit.DIVERGED:
            raise ended
        if not ended and (left := _unfinished(study)):
            raise ConfigError(
                f"[{' '.join(points[left[0]])}] left no run that finished; a search needs points "
                "that train and evaluate"
            )


def axis(word: Override) -> "BaseDistribution":
    """Return what a search may choose from, for an axis in Hydra's grammar."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    value = word.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution([*word.sweep_string_iterator()])
    low, high, log = value.start, value.end, "log" in value.tags
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def opened(folder: Path, asked: Sequence[str]) -> "Study":
    """Return the search in a folder, new or as it was left.

    Raises:
        ConfigError: It is another one.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(folder / _FILE)))
    study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True)
    before = study.user_attrs.get(_ASKED)
    if before is None:
        study.set_user_attr(_ASKED, [*asked])
    elif before != [*asked]:
        raise ConfigError(
            f"{folder} holds the search [{' '.join(before)}], and this one is "
            f"[{' '.join(asked)}]; type the first again, or name another folder by hydra.sweep.dir"
        )
    return study


def _unfinished(study: "Study") -> list[int]:
    """The trials that were begun, and neither finished nor diverged."""
    return [
        trial.number for trial in study.get_trials(deepcopy=False) if not trial.state.is_finished()
    ]


def _conclude(study: "Study", number: int, run_folder: Path | None) -> None:
    """Tell the study what a trial came to; nothing if it neither finished nor diverged."""
    from optuna.trial import TrialState

    events = Journal(run_folder / "events.jsonl").rows() if run_folder else []
    last = events[-1]["event"] if events else None
    if last == "diverge":
        study.tell(number, state=TrialState.PRUNED)
        print(f"search: trial {number} diverged, and is left at that")
    elif last == "finish" and "heldout_bits_per_byte" in (came_to := totals([], events)):
        bits = came_to["heldout_bits_per_byte"]
        study.tell(number, bits)
        print(f"search: trial {number}: {bits:.4f} bits per byte, the best {study.best_value:.4f}")


def _tell(study: "Study") -> None:
    """Say which trial was the best."""
    trials: list[Any] = study.get_trials(deepcopy=False)
    done = [trial for trial in trials if trial.value is not None]
    told = f"search: {len(done)} trials finished, {len(trials) - len(done)} diverged"
    if done:
        best = study.best_trial
        words = " ".join(f"{key}={value}" for key, value in best.params.items())
        told += (
            f"; the best is trial {best.number} [{words}]: {best.value:.4f} bits per byte held out"
        )
    print(told)
