"""Sends every point of a sweep to Slurm as a job of its own, and returns with a receipt for each.

All points are composed, resolved, planned, and shown to Slurm before the first one is sent. What is
sent is files: the configuration as composed, the program as it is now, and a script that submitit
writes and submits. A job therefore needs neither this process nor this checkout any more
(docs/adr/0025-jobs-are-files.md). An evaluation is one job, and so are its files.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import frozen
from hlat.config.errors import ConfigError
from hlat.jobs import slurm
from hlat.jobs.evaluation import Evaluation
from hlat.jobs.listing import rows
from hlat.jobs.submission import Place, Submission, make

from ._job import Job, compiled, evaluation_job
from ._job import job as job_of
from ._points import Point, check, grouped, record, returned
from ._sbatch import (
    SlurmLauncherConfig,
    body,
    parameters,
    refuse_settings,
    script,
    submission,
)
from ._sender import Sender
from ._snapshot import copy

if TYPE_CHECKING:
    from submitit import SlurmExecutor

ConfigStore.instance().store(
    group="hydra/launcher", name="slurm", node=SlurmLauncherConfig, provider="hlat"
)


class SlurmLauncher(Sender):
    """Hydra launcher that sends jobs, and waits for none of them."""

    name, schema, sees_files = "slurm", SlurmLauncherConfig, True
    settings: SlurmLauncherConfig

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Check all points, send them, and print and return a receipt for each.

        Raises:
            ConfigError: A point cannot run, or Slurm would refuse its job. Nothing was sent then.
        """
        refuse_settings(self.settings)
        points = check(self.context, self.config, job_overrides, self.settings.prune)
        refuse_running([point.folder for point in points])
        folder, done = Path(self.config.hydra.sweep.dir), []
        group = grouped(folder, points)
        with _places() as place_for:
            sendings = [
                _prepare(point, place_for, self.settings, self.flags, group) for point in points
            ]
            for i, (point, sending) in enumerate(zip(points, sendings, strict=True)):
                receipt, number = sending.send(), initial_job_idx + i
                record(folder, number, point, point.folder, receipt["job"])
                after = f" after job {receipt['after']} has compiled it" if sending.first else ""
                words = f"{after}  {' '.join(point.overrides)}"
                print(f"[{number}] {_told(receipt, 'trains', point.folder, words)}", flush=True)
                done.append(returned(point, number, receipt["job"], receipt))
        print(f"all of them:  python -m hlat.jobs {shlex.quote(str(folder))}")
        return done

    def evaluate(self, evaluation: Evaluation, folder: Path) -> None:
        """Send an evaluation, once Slurm has looked at its script, and print its receipt.

        Raises:
            ConfigError: Slurm would refuse it, or the same one waits or runs. Nothing was sent.
        """
        refuse_settings(self.settings)
        self.refuse_pruning()
        if alive := [f"{evaluation.model}: {told}" for told in _alive([evaluation.folder])]:
            raise ConfigError(*alive)
        with _places() as place_for:
            place = place_for(evaluation.folder)
            program = _program(self.settings, place)
            command = [*program, "hlat.evaluate", *evaluation.words]
            job = evaluation_job(evaluation, (*command,), Path.cwd())
            sent = submission(job, self.settings, [command], scores=Path.cwd() / evaluation.scores)
            sending = _write(f"{evaluation.model}:", place, job, sent, self.settings, program)
            copy(place.code)
            receipt = sending.send()
        print(_told(receipt, "evaluates", evaluation.folder, f" for {evaluation.model}"))


@contextmanager
def _places() -> Iterator[Callable[[Path], Place]]:
    """Makes places for what is to be sent from a folder; those of what was not sent go."""
    places: list[Place] = []

    def place_for(folder: Path) -> Place:
        places.append(make(Path.cwd() / folder))
        return places[-1]

    try:
        yield place_for
    finally:
        for place in places:
            if place.job is None:
                shutil.rmtree(place.folder)


@dataclass(frozen=True)
class Sending:
    """A job that is ready to be sent.

    Attributes:
        place: Where its files lie.
        executor: What sends it.
        line: What the script does.
        first: The job that must have succeeded before; None: none.
    """

    place: Place
    executor: "SlurmExecutor"
    line: str
    first: "Sending | None" = None

    def send(self) -> dict[str, Any]:
        """Send it, after the one that comes before, and return its receipt.

        Raises:
            ConfigError: Slurm refuses it.
        """
        receipt = {"run_folder": str(self.place.run_folder)}
        if self.first is not None:
            receipt["after"] = self.first.send()["job"]
            options = self.executor.parameters["additional_parameters"]
            waits = {"dependency": slurm.dependency(receipt["after"]), "kill-on-invalid-dep": "yes"}
            self.executor.update_parameters(additional_parameters=options | waits)
        try:
            job = self._submit()
        except ConfigError:
            if self.first is not None:
                slurm.cancel([receipt["after"]])
            raise
        return {"job": job, **receipt, "log": str(self.place.log(job))}

    def _submit(self) -> str:
        from submitit.core.utils import FailedJobError

        try:
            job: str = self.executor._submit_command(self.line).job_id
        except FailedJobError as error:
            raise ConfigError(f"sbatch refuses {self.place.folder}: {error}") from error
        self.place.receipts.append({"job": job, "time": time.time()})
        return job


def refuse_running(folders: Sequence[Path]) -> None:
    """Return if no job for any of these runs waits or runs.

    Raises:
        ConfigError: One does, or Slurm does not answer.
    """
    problems = [
        f"run.name={folder.name}: {told}" for folder in folders for told in _alive([folder])
    ]
    if problems:
        raise ConfigError(*problems)


def _alive(folders: Sequence[Path]) -> list[str]:
    """What waits or runs already, and how to end it."""
    return [
        f"job {row.job} is {row.state} for it; "
        f"python -m hlat.jobs cancel {shlex.quote(str(row.place.run_folder))} ends it"
        for row in rows(folders)
        if row.alive
    ]


def _prepare(
    point: Point,
    place_for: Callable[[Path], Place],
    settings: SlurmLauncherConfig,
    words: list[str],
    variables: dict[str, str],
) -> Sending:
    """Write what a run's job needs, and what the job before it needs if there is one.

    Raises:
        ConfigError: Slurm would refuse one of them.
    """
    shared = compiled(point.config, Path.cwd()) if settings.precompile else None
    before = place_for(point.folder) if shared else None
    place = place_for(point.folder)
    program = _program(settings, place)
    train = [*program, "hlat.train", frozen.FLAG, str(place.folder)]
    job = job_of(point.config, (*train,), Path.cwd())
    job = replace(job, environment=variables | job.environment)
    commands, first, told = [train], None, f"[{' '.join(point.overrides)}]"
    if before is not None:
        compile_all = [*program, "hlat.precompile", frozen.FLAG, str(place.folder)]
        sent = submission(job, settings, [compile_all])
        compiling = replace(job, name=f"{job.name}.compile")
        first = _write(told, before, compiling, sent, settings, program)
        commands = [[*program, "hlat.precompile", "merge", str(shared)], train]
    after = None if before is None else before.folder.name
    sent = submission(job, settings, commands, trains=True, after=after)
    sending = replace(_write(told, place, job, sent, settings, program), first=first)
    frozen.save(place.folder, point.composed, frozen.Words([*point.overrides], words))
    copy(place.code)
    return sending


def _program(settings: SlurmLauncherConfig, place: Place) -> list[str]:
    """The words before the name of a module of the copy, by which a node runs it."""
    return [settings.python or sys.executable, str(place.code)]


def _write(
    told: str,
    place: Place,
    job: Job,
    sent: Submission,
    settings: SlurmLauncherConfig,
    program: list[str],
) -> Sending:
    """Write what one job starts, once Slurm has looked at its script.

    Raises:
        ConfigError: Slurm would refuse it.
    """
    from submitit import SlurmExecutor

    given = parameters(job, settings, place.log("%j"), Path.cwd())
    if (refusal := slurm.refusal(script(given, place, program))) is not None:
        raise ConfigError(f"{told} Slurm refuses the job: {refusal}")
    place.save(sent)
    try:
        executor = SlurmExecutor(place.folder)
    except RuntimeError as error:  # it looks for srun
        raise ConfigError(f"this is no login node of Slurm: {error}") from error
    executor.update_parameters(**given)
    return Sending(place, executor, body(place, program))


def _told(receipt: dict[str, Any], does: str, folder: Path, further: str) -> str:
    return (
        f"job {receipt['job']} {does} {folder}{further}\n"
        f"    follow it:  python -m hlat.jobs logs --follow {shlex.quote(str(folder))}"
    )
