"""Launcher that writes a SkyPilot task for every point, and starts it as a managed job.

SkyPilot creates the nodes, restarts the job on others after a preemption or the loss of a node, and
deletes them at its end. Data and run directory are in storage that all nodes mount.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import frozen_config
from hlat.config.command_job import CommandJob
from hlat.config.config_errors import ConfigError, ExitCode, raise_config_errors
from hlat.distributed import rank_environment

from .._hourly_cost import format_hourly_cost
from .._job_spec import Accelerator, JobSpec, build_command_job, build_object_name
from .._pruning_settings import PruningConfig
from .._scheduler_launcher import SchedulerLauncher, build_launcher_schema
from .._yaml_writer import format_yaml

_LAUNCHER = "hydra.launcher"
_CONFIG_DIR, _RDZV_PORT = '"$CONFIG"', 41000
_FINAL_EXIT_CODES = {int(code) for code in (ExitCode.CONFIGURATION, ExitCode.DIVERGED)}


@dataclass
class SkyPilotLauncherConfig(PruningConfig):
    """Settings of SkyPilot jobs."""

    _target_: str = "hydra_plugins.hlat_launchers.skypilot._skypilot_launcher.SkyPilotLauncher"
    setup: str | None = None
    """Shell commands that install hlat on a node; null: the image contains it."""
    mount: str = "/mnt/hlat"
    """Base directory of relative paths in the configuration; a path of file_mounts or volumes."""
    file_mounts: dict[str, Any] = field(default_factory=dict)
    """SkyPilot's file_mounts, such as {/mnt/hlat: {source: s3://BUCKET, mode: MOUNT_CACHED}}."""
    volumes: dict[str, Any] = field(default_factory=dict)
    """SkyPilot's volumes, such as {/mnt/hlat: NAME}."""
    infra: str = "aws"
    """SkyPilot's infra: cloud[/region[/zone]], or k8s/CONTEXT."""
    resources: dict[str, Any] = field(default_factory=dict)
    """Further fields of SkyPilot's resources, such as use_spot; null removes a field."""
    secrets: list[str] = field(default_factory=list)
    """Names of environment variables of the submitting shell that the job receives as secrets."""
    recover_on_exit_codes: list[int] = field(default_factory=lambda: [int(ExitCode.PREEMPTED)])
    """Exit codes after which SkyPilot restarts the job, without a limit."""


ConfigStore.instance().store(
    group="hydra/launcher",
    name="skypilot",
    node=build_launcher_schema(SkyPilotLauncherConfig),
    provider="hlat",
)


class SkyPilotLauncher(SchedulerLauncher):
    """Hydra launcher that starts managed jobs without waiting for them."""

    name, schema, shares_file_system = "skypilot", SkyPilotLauncherConfig, False
    settings: SkyPilotLauncherConfig

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Validate all points, write their tasks, start them, and return a receipt for each."""
        command = ("python", "-m", "hlat.train", frozen_config.FROZEN_FLAG, _CONFIG_DIR)
        jobs = self.build_jobs(job_overrides, command, Path(self.settings.mount))
        self._validate([job for _, job in jobs])
        directories = [self.write_configuration(point, job) for point, job in jobs]
        files = [self._write_task(job, d) for (_, job), d in zip(jobs, directories, strict=True)]
        returns = []
        for number, ((point, job), file) in enumerate(
            zip(jobs, files, strict=True), initial_job_idx
        ):
            self._start(file, f"[{number}] {file} trains {job.run_dir}")
            print(f"    cost:    {format_hourly_cost(point.config.hardware)}", flush=True)
            returns.append(self.record_job(point, job, number, {"task": str(file)}))
        return returns

    def submit_command(self, job: CommandJob, directory: Path) -> None:
        """Start a command and print its receipt."""
        self.validate_no_pruning()
        command = ("python", "-m", f"hlat.{job.command}", *job.arguments)
        spec = build_command_job(job, command, Path(self.settings.mount))
        self._validate([spec])
        file = self._write_task(spec, directory / build_object_name(spec.name))
        self._start(file, f"{file} {job.verb} {job.subject}")

    def _write_task(self, job: JobSpec, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "task.yaml").write_text(format_yaml(build_task(job, directory, self.settings)))
        return directory / "task.yaml"

    def _start(self, file: Path, action: str) -> None:
        secrets = [word for name in self.settings.secrets for word in ("--secret", name)]
        command = ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, str(file)]
        if shutil.which("sky") is None:
            print(f"{action}; start it with:  {shlex.join(command)}")
        elif subprocess.run(command).returncode:
            raise ConfigError(
                f"sky does not start {file}; correct it and run: {shlex.join(command)}"
            )
        else:
            print(f"{action}\n    log:     sky jobs logs --name {file.parent.name}", flush=True)

    def _validate(self, jobs: Sequence[JobSpec]) -> None:
        """Raise ConfigError if the settings are invalid, or contradict the hardware of a job."""
        settings, problems = self.settings, []
        if settings.mount not in {**settings.file_mounts, **settings.volumes}:
            problems.append(
                f"{_LAUNCHER}.mount={settings.mount} is not a path of {_LAUNCHER}.file_mounts or "
                "volumes, so checkpoints would be lost with the nodes; add it to one of them"
            )
        for code in sorted({*settings.recover_on_exit_codes} & {0, *_FINAL_EXIT_CODES}):
            problems.append(f"{_LAUNCHER}.recover_on_exit_codes contains {code}; remove it")
        for job in jobs:
            type_ = job.node_type
            if type_ and type_.accelerator is Accelerator.neuron and job.num_nodes > 1:
                problems.append(
                    f"hardware.nodes={job.num_nodes} of {job.instance_type} need EFA, and SkyPilot "
                    "attaches it to GPUs only; use hydra/launcher=slurm or kubernetes"
                )
        raise_config_errors(dict.fromkeys(problems))


def build_task(job: JobSpec, directory: Path, settings: SkyPilotLauncherConfig) -> dict[str, Any]:
    """Return the task of a job with its configuration in `directory`."""
    recovery = {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": settings.recover_on_exit_codes,
    }
    resources: dict[str, Any] = {"infra": settings.infra, "job_recovery": recovery}
    if job.node_type is not None:
        resources["instance_type"] = job.instance_type
        if job.node_type.accelerator is Accelerator.gpu:
            resources["network_tier"] = "best"  # EFA
    words = [word if word == _CONFIG_DIR else shlex.quote(word) for word in job.command]
    run = f"""\
CONFIG=$PWD
cd {shlex.quote(settings.mount)}
export {rank_environment.NUM_NODES_ENV}=$SKYPILOT_NUM_NODES
export {rank_environment.NODE_RANK_ENV}=$SKYPILOT_NODE_RANK
export {rank_environment.RDZV_ENDPOINT_ENV}=$(head -n1 <<<"$SKYPILOT_NODE_IPS"):{_RDZV_PORT}
exec {" ".join(words)}
"""
    task = {
        "name": build_object_name(job.name),
        "num_nodes": job.num_nodes,
        "workdir": str(directory.resolve()),
        "resources": {k: v for k, v in (resources | settings.resources).items() if v is not None},
        "envs": job.environment,
        "secrets": dict.fromkeys(settings.secrets),
        "file_mounts": settings.file_mounts,
        "volumes": settings.volumes,
        "setup": settings.setup,
        "run": run,
    }
    return {key: value for key, value in task.items() if value}
