"""Sweeper that searches hyperparameters with Optuna.

The local launcher or Slurm runs the trials. Their results are read from the run directories, so a
killed search can resume (docs/adr/0034-a-search-reads-run-folders.md).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.tracking import sweep_log
from hlat.tracking.jsonl_log import JsonlLog
from hlat.tracking.summary_metrics import compute_summary_metrics

from .._sweep_points import get_entry_point
from ..local._local_launcher import LocalLauncher
from ..slurm._slurm_launcher import SlurmLauncher
from ._search_jobs import STOPPED_ATTRIBUTE, SearchJobs, run_search_jobs

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner

_JOURNAL_FILE = "search.journal"
_ARGUMENTS_ATTRIBUTE = "asked"
"""User attribute of the study with the arguments of the search."""


@dataclass
class SearchSweeperConfig:
    """Settings of a search."""

    _target_: str = "hydra_plugins.hlat_launchers.search._search_sweeper.SearchSweeper"
    params: dict[str, str] = field(default_factory=dict)
    """Search space by key: interval(a,b), tag(log,interval(a,b)), or values."""
    trials: int = 16
    """Total number of trials, including diverged ones and those of an interrupted search."""
    seed: int = 1
    """Seed of the sampler."""
    asha_min_steps: int = 0
    """Steps after which ASHA may stop a trial that is worse than others, with hydra/launcher=slurm;
    0: only diverged trials are stopped."""
    asha_reduction_factor: int = 4
    """Factor between the steps of two decisions of ASHA, and part of the trials that continues."""
    poll_s: float = 15.0
    """Seconds between two readings of the results of Slurm jobs."""


ConfigStore.instance().store(
    group="hydra/sweeper", name="search", node=SearchSweeperConfig, provider="hlat"
)


class SearchSweeper(Sweeper):
    """Hydra sweeper that minimizes the held-out bits per byte at the end of a run."""

    def __init__(
        self,
        params: Mapping[str, str],
        trials: int,
        seed: int,
        asha_min_steps: int = 0,
        asha_reduction_factor: int = 4,
        poll_s: float = 15.0,
    ) -> None:
        self.params, self.trials, self.seed, self.poll_s = params, trials, seed, poll_s
        self.asha_min_steps, self.asha_reduction_factor = asha_min_steps, asha_reduction_factor

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the context of the search.

        Raises:
            ConfigError: Optuna is not installed, the launcher does not wait for its jobs, or the
                entry point is not hlat.train.
        """
        if find_spec("optuna") is None:
            raise ConfigError(
                "hydra/sweeper=search needs optuna; install it with pip install 'hlat[search]'"
            )
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        if not isinstance(self.launcher, LocalLauncher | SlurmLauncher):
            chosen = config.hydra.runtime.choices["hydra/launcher"]
            raise ConfigError(
                f"hydra/launcher={chosen} does not return the result of a trial, which a search "
                "needs; use hydra/launcher=local or slurm"
            )
        if isinstance(self.launcher, LocalLauncher):
            self.launcher.num_points = self.trials
        if self.asha_min_steps and not isinstance(self.launcher, SlurmLauncher):
            raise ConfigError(
                f"hydra.sweeper.asha_min_steps={self.asha_min_steps} stops jobs of "
                "hydra/launcher=slurm; set it to 0 with hydra/launcher=local"
            )
        if isinstance(self.launcher, SlurmLauncher) and self.launcher.settings.dry_run:
            raise ConfigError(
                "hydra.launcher.dry_run=true: a search needs the results of its trials; remove it"
            )
        if (name := get_entry_point(task_function)) != "train":
            raise ConfigError(f"hydra/sweeper=search is for hlat.train, not for hlat.{name}")
        self.num_parallel_trials = self.launcher.settings.jobs or self.trials
        self.sweep_dir = Path(config.hydra.sweep.dir)
        self.parser = OverridesParser.create(config_loader=hydra_context.config_loader)

    def sweep(self, arguments: list[str]) -> None:
        """Run the configured number of trials and print the best.

        Unfinished trials of an interrupted search run first.

        Raises:
            ConfigError: The search space is empty, or the directory belongs to another search.
            SystemExit: A trial failed or was interrupted; with its exit code.
        """
        arguments = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        parsed = self.parser.parse_overrides(arguments)
        overrides = {override.get_key_element(): override for override in parsed}
        space = {
            key: build_distribution(override)
            for key, override in overrides.items()
            if override.is_sweep_override()
        }
        if not space:
            raise ConfigError(
                "a search needs an axis; set one, as in optimizer.lr=interval(1e-4,1e-2)"
            )
        fixed = [str(o.input_line) for o in overrides.values() if not o.is_sweep_override()]
        study = open_study(self.sweep_dir, arguments)
        find_points = partial(_find_points, study, fixed)
        if isinstance(self.launcher, SlurmLauncher):
            study.pruner = self._build_pruner()
            jobs = SearchJobs(self.launcher, study, self.sweep_dir, _report_trial)
            run_search_jobs(jobs, find_points, partial(self._sample, study, space), self.poll_s)
        else:
            if not find_points():
                self._sample(study, space)
            while points := find_points():
                self._run_trials(study, points)
                self._sample(study, space)
        _print_best_trial(study)

    def _build_pruner(self) -> "BasePruner":
        from optuna.pruners import NopPruner, SuccessiveHalvingPruner

        if not self.asha_min_steps:
            return NopPruner()
        return SuccessiveHalvingPruner(
            min_resource=self.asha_min_steps, reduction_factor=self.asha_reduction_factor
        )

    def _sample(self, study: "Study", space: Mapping[str, "BaseDistribution"]) -> None:
        """Sample as many further trials as can run in parallel.

        A sample depends only on its number and the results of the previous trials, so an
        interrupted search on this machine continues with the same trials.
        """
        from optuna.samplers import TPESampler

        first = len(study.get_trials(deepcopy=False))
        num_free = self.num_parallel_trials - len(_find_unfinished_trials(study))
        for number in range(first, min(first + num_free, self.trials)):
            study.sampler = TPESampler(seed=self.seed + number)
            study.ask({**space})

    def _run_trials(self, study: "Study", points: Mapping[int, Sequence[str]]) -> None:
        """Run trials and report their results to the study; identical trials run once."""
        unique_points = [*dict.fromkeys(map(tuple, points.values()))]
        exit_error = None
        try:
            self.launcher.launch(unique_points, initial_job_idx=min(points))
        except SystemExit as error:
            exit_error = error
        for number, point in points.items():
            _report_trial(study, number, sweep_log.find_run_dir(self.sweep_dir, point))
        if exit_error and exit_error.code != ExitCode.DIVERGED:
            raise exit_error
        if not exit_error and (unfinished := _find_unfinished_trials(study)):
            raise ConfigError(
                f"[{' '.join(points[unfinished[0]])}] has no finished run; a search needs points "
                "that train and evaluate"
            )


def build_distribution(override: Override) -> "BaseDistribution":
    """Return the distribution of an axis in Hydra's grammar."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution([*override.sweep_string_iterator()])
    low, high, log = value.start, value.end, "log" in value.tags
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def open_study(sweep_dir: Path, arguments: Sequence[str]) -> "Study":
    """Return the study of a sweep directory, which is created if it does not exist.

    Raises:
        ConfigError: The study belongs to a search with other arguments.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(logging.WARNING)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(sweep_dir / _JOURNAL_FILE)))
    study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True)
    recorded = study.user_attrs.get(_ARGUMENTS_ATTRIBUTE)
    if recorded is None:
        study.set_user_attr(_ARGUMENTS_ATTRIBUTE, [*arguments])
    elif recorded != [*arguments]:
        raise ConfigError(
            f"{sweep_dir} contains the search [{' '.join(recorded)}], and this one is "
            f"[{' '.join(arguments)}]; use the same arguments, or another hydra.sweep.dir"
        )
    return study


def _find_unfinished_trials(study: "Study") -> list[int]:
    trials = study.get_trials(deepcopy=False)
    return [trial.number for trial in trials if not trial.state.is_finished()]


def _find_points(study: "Study", fixed: list[str]) -> dict[int, list[str]]:
    """Return the overrides of the unfinished trials by number."""
    trials = study.get_trials(deepcopy=False)
    return {
        number: fixed + [f"{key}={value}" for key, value in trials[number].params.items()]
        for number in _find_unfinished_trials(study)
    }


def _report_trial(study: "Study", number: int, run_dir: Path | None) -> None:
    """Report the result of a trial that finished or diverged to the study."""
    from optuna.trial import TrialState

    events = JsonlLog(run_dir / "events.jsonl").read_rows() if run_dir else []
    last = events[-1]["event"] if events else None
    if last == "diverge":
        study.tell(number, state=TrialState.PRUNED)
        print(f"search: trial {number} diverged")
    elif last == "finish":
        bits = compute_summary_metrics([], events).get("heldout_bits_per_byte")
        if bits is not None:
            study.tell(number, bits)
            best = f"{study.best_value:.4f}"
            print(f"search: trial {number}: {bits:.4f} bits per byte, best {best}")


def _print_best_trial(study: "Study") -> None:
    from optuna.trial import TrialState

    trials: list[Any] = study.get_trials(deepcopy=False)
    num_finished = sum(trial.state is TrialState.COMPLETE for trial in trials)
    pruned = [trial for trial in trials if trial.state is TrialState.PRUNED]
    num_stopped = sum(STOPPED_ATTRIBUTE in trial.user_attrs for trial in pruned)
    text = f"search: {num_finished} trials finished, "
    if num_stopped:
        text += f"{num_stopped} stopped by ASHA, "
    text += f"{len(trials) - num_finished - num_stopped} diverged"
    if num_finished:
        best = study.best_trial
        params = " ".join(f"{key}={value}" for key, value in best.params.items())
        text += f"; best trial {best.number} [{params}]: {best.value:.4f} held-out bits per byte"
    print(text)
