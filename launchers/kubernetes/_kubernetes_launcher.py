"""Launcher that creates one Kubernetes workload for every point of a sweep.

All points are composed, validated, planned and written, and the cluster validates all manifests,
before the first workload is created. Without kubectl, the manifests are only written. A command
is one manifest.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hlat.config.command_job import CommandJob
from hlat.config.config_errors import ConfigError

from .._hourly_cost import format_hourly_cost
from .._job_spec import (
    JobSpec,
    build_command_job,
    build_object_name,
    get_compiled_graphs_dir,
)
from .._scheduler_launcher import SchedulerLauncher, build_launcher_schema
from .._sweep_points import SweepPoint
from .._yaml_writer import format_yaml
from ._kubernetes_manifest import (
    TRAIN_COMMAND,
    KubernetesLauncherConfig,
    build_manifest,
    build_pod_selector,
)
from ._kubernetes_validation import validate_kubernetes_jobs, validate_kubernetes_settings

_MANIFEST_FILE = "manifest.yaml"


ConfigStore.instance().store(
    group="hydra/launcher",
    name="kubernetes",
    node=build_launcher_schema(KubernetesLauncherConfig),
    provider="hlat",
)


class KubernetesLauncher(SchedulerLauncher):
    """Hydra launcher that writes manifests and creates their objects without waiting for them."""

    name, schema, shares_file_system = "kubernetes", KubernetesLauncherConfig, False
    settings: KubernetesLauncherConfig

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Validate the settings, before Hydra's sweeper writes them to multirun.yaml.

        Raises:
            ConfigError: The entry point is not hlat.train, or a setting is invalid.
        """
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        validate_kubernetes_settings(self.settings)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Validate all points, create their objects, and print and return a receipt for each.

        Raises:
            ConfigError: A point is invalid, or the cluster rejects its manifest. Nothing is created
                then, unless the cluster changes after the validation.
        """
        mount = Path(self.settings.mount)
        jobs = self.build_jobs(job_overrides, TRAIN_COMMAND, mount)
        validate_kubernetes_jobs([point.config for point, _ in jobs], self.settings)
        files = [self._write_run_manifest(point, job) for point, job in jobs]
        kubectl = self._find_kubectl(files)
        if kubectl is not None:
            create_objects(kubectl, files, "--dry-run=server")
        job_returns = []
        for number, ((point, job), file) in enumerate(
            zip(jobs, files, strict=True), initial_job_idx
        ):
            if kubectl is not None:
                create_objects(kubectl, [file])
            text = self._format_receipt(job, f"trains {job.run_dir}", file, kubectl)
            cost = format_hourly_cost(point.config.hardware)
            print(f"[{number}] {text}\n    cost:    {cost}", flush=True)
            receipt = {"name": build_object_name(job.name), "manifest": str(file)}
            job_returns.append(self.record_job(point, job, number, receipt))
        return job_returns

    def submit_command(self, job: CommandJob, directory: Path) -> None:
        """Create the objects of a command after validation by the cluster; print a receipt."""
        validate_kubernetes_settings(self.settings)
        validate_kubernetes_jobs([job.config], self.settings)
        self.validate_no_pruning()
        spec = _build_command_spec(job, self.settings)
        documents = build_command_manifest(job, self.settings)
        file = write_manifest(directory / build_object_name(spec.name), documents)
        kubectl = self._find_kubectl([file])
        if kubectl is not None:
            create_objects(kubectl, [file], "--dry-run=server")
            create_objects(kubectl, [file])
        text = self._format_receipt(spec, f"{job.verb} {job.subject}", file, kubectl)
        print(f"{text}\n    cost:    {format_hourly_cost(job.config.hardware)}")

    def _write_run_manifest(self, point: SweepPoint, job: JobSpec) -> Path:
        """Write the configuration of a point and its manifest; return the manifest's path."""
        directory = self.write_configuration(point, job)
        files = {file.name: file.read_text() for file in sorted(directory.iterdir())}
        graphs_dir = None
        if self.settings.precompile:
            graphs_dir = get_compiled_graphs_dir(point.config, job.working_directory)
        return write_manifest(directory, build_manifest(job, files, self.settings, graphs_dir))

    def _find_kubectl(self, files: Sequence[Path]) -> str | None:
        """Return the path of kubectl; in a dry run, print the manifests and return None."""
        if not self.settings.dry_run:
            return shutil.which("kubectl")
        for file in files:
            print(file.read_text())
        return None

    def _format_receipt(self, job: JobSpec, action: str, file: Path, kubectl: str | None) -> str:
        if kubectl is None:
            command = ("kubectl", "create", "-f", str(file))
            return f"{file} {action}; create it with:  {shlex.join(command)}"
        selector = build_pod_selector(job, self.settings)
        namespace = ("--namespace", self.settings.namespace)
        logs = ("kubectl", "logs", "--follow", *namespace, "--selector", selector)
        return (
            f"{self.settings.kind.value} {build_object_name(job.name)} {action}\n"
            f"    log:     {shlex.join(logs)}\n"
            f"    delete:  {shlex.join(('kubectl', 'delete', '-f', str(file)))}"
        )


def build_command_manifest(
    job: CommandJob, settings: KubernetesLauncherConfig
) -> list[dict[str, Any]]:
    """Return the YAML documents of a command."""
    return build_manifest(_build_command_spec(job, settings), {}, settings)


def _build_command_spec(job: CommandJob, settings: KubernetesLauncherConfig) -> JobSpec:
    command = ("python", "-m", f"hlat.{job.command}", *job.arguments)
    return build_command_job(job, command, Path(settings.mount))


def write_manifest(directory: Path, documents: list[dict[str, Any]]) -> Path:
    """Write YAML documents to a manifest in `directory`, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MANIFEST_FILE).write_text(format_yaml(*documents))
    return directory / _MANIFEST_FILE


def create_objects(kubectl: str, files: Sequence[Path], *flags: str) -> None:
    """Run `kubectl create` for manifests.

    Raises:
        ConfigError: The cluster rejects the objects, has objects with these names, or does not
            answer.
    """
    command = [kubectl, "create", *flags, *(word for file in files for word in ("-f", str(file)))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(*(f"kubectl create: {line}" for line in lines))
