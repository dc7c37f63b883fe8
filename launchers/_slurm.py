"""Sends every point of a sweep to Slurm as a job of its own, and returns with a receipt for each.

All points are composed, resolved, planned, and shown to Slurm before the first one is sent. What is
sent is files: the configuration as composed, the program as it is now, and a script that submitit
writes and submits. A job therefore needs neither this process nor this checkout any more
(docs/adr/0025-jobs-are-files.md).
"""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import frozen
from hlat.config.errors import ConfigError
from hlat.jobs import slurm
from hlat.jobs.listing import rows
from hlat.jobs.submission import Place, Submission, make

from ._job import OPEN_FILES, Job, compiled
from ._job import job as job_of
from ._points import Point, Pruning, check, grouped, record, returned
from ._sender import Sender
from ._snapshot import copy

if TYPE_CHECKING:
    from submitit import SlurmExecutor

_TIME = re.compile(r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+")
"""As sbatch takes it: minutes, minutes:seconds, days-hours:minutes ..."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_OWNED = {
    "array": "each point is a job of its own",
    "chdir": "the job runs where it was sent from",
    "nodes": "set hardware.nodes",
    "ntasks": "one a node, which starts hardware.processes_per_node others",
    "ntasks-per-node": "one, which starts hardware.processes_per_node others",
    "output": "it goes to the folder of the submission, where hlat.jobs finds it",
    "signal": "set hydra.launcher.signal_s",
    "no-requeue": "set hydra.launcher.max_attempts=1",
}
"""Options that something else decides."""


@dataclass
class SlurmLauncherConfig(Pruning):
    """How jobs are sent to Slurm."""

    _target_: str = "hydra_plugins.hlat_launchers._slurm.SlurmLauncher"
    partition: str | None = None
    """Where the nodes are; null: the cluster's default."""
    account: str | None = None
    """Who pays."""
    time: str | None = None
    """Limit of one attempt, as sbatch takes it; a run that takes longer is started again and goes
    on. null: the partition's."""
    signal_s: int = 300
    """Seconds before the limit at which the run is asked to save; more than a save takes. Slurm may
    be a minute early."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclusive: bool = True
    """Take whole nodes, with all of their memory."""
    container_image: str | None = None
    """Image in which the run is started (Pyxis, or another plugin that gives srun the option)."""
    max_attempts: int = 100
    """Times that a job may be started (HLAT's own agent: 100)."""
    precompile: bool = True
    """Compile what engine=nxd executes on Trainium in a job before, which the run's waits for."""
    python: str | None = None
    """Python on the nodes; null: the one that runs this."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch by their long names; true for those that take no value."""
    srun_options: dict[str, Any] = field(default_factory=dict)
    """The same of srun."""


ConfigStore.instance().store(
    group="hydra/launcher", name="slurm", node=SlurmLauncherConfig, provider="hlat"
)


class SlurmLauncher(Sender):
    """Hydra launcher that sends jobs, and waits for none of them."""

    name, schema = "slurm", SlurmLauncherConfig
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
        with self._prepared(points, folder) as sendings:
            for number, sending in enumerate(sendings, initial_job_idx):
                receipt = sending.send()
                point, job = sending.point, receipt["job"]
                record(folder, number, point, point.folder, job)
                print(f"[{number}] {_told(sending, receipt)}", flush=True)
                done.append(returned(point, number, job, receipt))
        print(f"all of them:  python -m hlat.jobs {shlex.quote(str(folder))}")
        return done

    @contextmanager
    def _prepared(self, points: Sequence[Point], folder: Path) -> Iterator["list[Sending]"]:
        """Everything that is to be sent, on disk and looked at by Slurm; what was not sent goes."""
        places: list[Place] = []

        def place_for(point: Point) -> Place:
            places.append(make(Path.cwd() / point.folder))
            return places[-1]

        group = grouped(folder, points)
        try:
            yield [_prepare(point, place_for, self.settings, self.flags, group) for point in points]
        finally:
            for place in places:
                if place.job is None:
                    shutil.rmtree(place.folder)


@dataclass(frozen=True)
class Sending:
    """A job that is ready to be sent.

    Attributes:
        point: What it trains.
        place: Where its files lie.
        executor: What sends it.
        line: What the script does.
        first: The job that must have succeeded before; None: none.
    """

    point: Point
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


def refuse_settings(settings: SlurmLauncherConfig) -> None:
    """Return if the settings are such that Slurm reads them as they are meant.

    Raises:
        ConfigError: They are not.
    """
    problems = []
    if settings.time is not None and not _TIME.fullmatch(settings.time):
        problems.append(
            f"hydra.launcher.time={settings.time!r} is no limit; write minutes, or 2-12:00:00"
        )
    for key, least in (("signal_s", 1), ("max_attempts", 1)):
        if (number := getattr(settings, key)) < least:
            problems.append(f"hydra.launcher.{key}={number} is too small; use {least} or more")
    for name in ("options", "srun_options"):
        for key, value in getattr(settings, name).items():
            full = f"hydra.launcher.{name}.{key}"
            if not _OPTION.fullmatch(key):
                problems.append(f"{full} is not the long name of an option, such as mail-user")
            elif key in _OWNED:
                problems.append(f"{full}: {_OWNED[key]}")
            elif not isinstance(value, (str, int, float)):
                problems.append(f"{full}={value} is no text or number; or true, if it takes none")
    if problems:
        raise ConfigError(*problems)


def refuse_running(folders: Sequence[Path]) -> None:
    """Return if no job for any of these runs waits or runs.

    Raises:
        ConfigError: One does, or Slurm does not answer.
    """
    problems = [
        f"run.name={row.place.run_folder.name}: job {row.job} is {row.state} for it; "
        f"python -m hlat.jobs cancel {shlex.quote(str(row.place.run_folder))} ends it"
        for row in rows(folders)
        if row.alive
    ]
    if problems:
        raise ConfigError(*problems)


def parameters(
    job: Job, settings: SlurmLauncherConfig, log: Path, working_directory: Path
) -> dict[str, Any]:
    """What submitit is told of a job: one task a node, which starts and watches all others.

    Raises:
        ConfigError: A value has line breaks or the like, which would end the line that it is in.
    """
    options: dict[str, Any] = {
        "chdir": str(working_directory),
        "output": str(log.parent).replace("%", "%%") + f"/{log.name}",
        "requeue": True,
        "signal": f"B:USR2@{settings.signal_s}",  # to the script alone, which knows what to do
        **({"mem": 0} if settings.exclusive else {}),
        **{_submitits(key): value for key, value in settings.options.items() if value is not False},
    }
    found: dict[str, Any] = {
        "job_name": job.name,
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "constraint": settings.constraint,
        "exclusive": settings.exclusive or None,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": ["trap '' USR2  # until the program below takes care of it"],
        "additional_parameters": options,
    }
    for key, value in (found | options).items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{key}={value!r} has characters that an sbatch script cannot have")
    return found


def body(place: Place, program: Sequence[str]) -> str:
    """The line of the script that does it all.

    Args:
        place: What is sent.
        program: Words that run a module of the copy.
    """
    return f"exec {shlex.join([*program, 'hlat.jobs.attempt', str(place.folder)])}"


def script(parameters: dict[str, Any], place: Place, program: Sequence[str]) -> str:
    """The text that sbatch is given."""
    from submitit.slurm.slurm import _make_sbatch_string

    text: str = _make_sbatch_string(body(place, program), place.folder, **parameters)
    return text


def _prepare(
    point: Point,
    place_for: Callable[[Point], Place],
    settings: SlurmLauncherConfig,
    words: list[str],
    variables: dict[str, str],
) -> Sending:
    """Write what a run's job needs, and what the job before it needs if there is one.

    Raises:
        ConfigError: Slurm would refuse one of them.
    """
    shared = compiled(point.config, Path.cwd()) if settings.precompile else None
    before = place_for(point) if shared else None
    place = place_for(point)
    program = [settings.python or sys.executable, str(place.code)]
    train = [*program, "hlat.train", frozen.FLAG, str(place.folder)]
    job = job_of(point.config, (*train,), Path.cwd())
    job = replace(job, environment=variables | job.environment)
    commands, first = [train], None
    if before is not None:
        compile_all = [*program, "hlat.precompile", frozen.FLAG, str(place.folder)]
        sent = submission(job, settings, [compile_all], trains=False)
        compiling = replace(job, name=f"{job.name}.compile")
        first = _write(point, before, compiling, sent, settings, program)
        commands = [[*program, "hlat.precompile", "merge", str(shared)], train]
    after = None if before is None else before.folder.name
    sent = submission(job, settings, commands, trains=True, after=after)
    sending = replace(_write(point, place, job, sent, settings, program), first=first)
    frozen.save(place.folder, point.composed, frozen.Words([*point.overrides], words))
    copy(place.code)
    return sending


def _write(
    point: Point,
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

    told = parameters(job, settings, place.log("%j"), Path.cwd())
    if (refusal := slurm.refusal(script(told, place, program))) is not None:
        raise ConfigError(f"[{' '.join(point.overrides)}] Slurm refuses the job: {refusal}")
    place.save(sent)
    try:
        executor = SlurmExecutor(place.folder)
    except RuntimeError as error:  # it looks for srun
        raise ConfigError(f"this is no login node of Slurm: {error}") from error
    executor.update_parameters(**told)
    return Sending(point, place, executor, body(place, program))


def submission(
    job: Job,
    settings: SlurmLauncherConfig,
    commands: list[list[str]],
    *,
    trains: bool,
    after: str | None = None,
) -> Submission:
    """What each attempt of a job starts."""
    image = settings.container_image
    options = {} if image is None else {"container-image": image}
    options |= settings.srun_options
    return Submission(
        nodes=job.nodes,
        commands=commands,
        trains=trains,
        environment=job.environment,
        options=[*map(_flag, options.items())],
        max_attempts=settings.max_attempts,
        open_files=OPEN_FILES,
        after=after,
    )


def _flag(option: tuple[str, Any]) -> str:
    name, value = option
    return f"--{name}" if value is True else f"--{name}={value}"


def _submitits(key: str) -> str:
    """The name by which submitit knows an option of sbatch, so that it is not given twice."""
    return key if key == "open-mode" else key.replace("-", "_")


def _told(sending: Sending, receipt: dict[str, Any]) -> str:
    folder = sending.point.folder
    after = f" after job {receipt['after']} has compiled it" if "after" in receipt else ""
    return (
        f"job {receipt['job']} trains {folder}{after}  {' '.join(sending.point.overrides)}\n"
        f"    follow it:  python -m hlat.jobs logs --follow {shlex.quote(str(folder))}"
    )
