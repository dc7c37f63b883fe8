"""Launcher that creates one Kubernetes workload for every point of a sweep.

All points are composed, validated, planned and written, and the cluster validates all manifests,
before the first workload is created. Without kubectl, the manifests are only written. An evaluation
is one manifest.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import frozen_config
from hlat.config.config_errors import ConfigError
from hlat.jobs.evaluation_job import EvaluationJob

from .._job_spec import JobSpec, build_evaluation_job, build_job, get_compiled_graphs_dir
from .._scheduler_launcher import SchedulerLauncher
from .._sweep_points import (
    SweepPoint,
    build_group_environment,
    build_job_return,
    record_point,
    validate_points,
)
from .._yaml_writer import format_yaml
from ._kubernetes_manifest import (
    TRAIN_COMMAND,
    KubernetesLauncherConfig,
    build_manifest,
    build_object_name,
    build_pod_selector,
    validate_kubernetes_settings,
)

_MANIFEST_FILE = "manifest.yaml"

ConfigStore.instance().store(
    group="hydra/launcher", name="kubernetes", node=KubernetesLauncherConfig, provider="hlat"
)


class KubernetesLauncher(SchedulerLauncher):
    """Hydra launcher that writes manifests and creates their objects without waiting for them."""

    name, schema, shares_file_system = "kubernetes", KubernetesLauncherConfig, False
    settings: KubernetesLauncherConfig

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Validate all points, create their objects, and print and return a receipt for each.

        Raises:
            ConfigError: A point is invalid, or the cluster rejects its manifest. Nothing is created
                then, unless the cluster changes after the validation.
        """
        validate_kubernetes_settings(self.settings)
        points = validate_points(self.context, self.config, job_overrides, self.settings.prune)
        sweep_dir = Path(self.config.hydra.sweep.dir)
        environment = build_group_environment(sweep_dir, points)
        jobs = [
            build_job(point.config, TRAIN_COMMAND, Path(self.settings.mount)) for point in points
        ]
        jobs = [replace(job, environment=environment | job.environment) for job in jobs]
        directories = [sweep_dir / build_object_name(job.name) for job in jobs]
        files = [*map(self._write_run_manifest, directories, points, jobs)]
        kubectl = shutil.which("kubectl")
        if kubectl is not None:
            create_objects(kubectl, files, "--dry-run=server")
        job_returns = []
        for i, (point, job, file) in enumerate(zip(points, jobs, files, strict=True)):
            if kubectl is not None:
                create_objects(kubectl, [file])
            number, name = initial_job_idx + i, build_object_name(job.name)
            text = self._format_receipt(job, f"trains {job.run_dir}", file, kubectl)
            print(f"[{number}] {text}", flush=True)
            receipt = {"name": name, "run_folder": str(job.run_dir), "manifest": str(file)}
            record_point(sweep_dir, number, point, job.run_dir)
            job_returns.append(build_job_return(point, number, name, receipt))
        return job_returns

    def submit_evaluation(self, evaluation: EvaluationJob, directory: Path) -> None:
        """Create the objects of an evaluation after validation by the cluster; print a receipt."""
        validate_kubernetes_settings(self.settings)
        self.validate_no_pruning()
        job = _build_evaluation_job(evaluation, self.settings)
        documents = build_evaluation_manifest(evaluation, self.settings)
        file = write_manifest(directory / build_object_name(job.name), documents)
        kubectl = shutil.which("kubectl")
        if kubectl is not None:
            create_objects(kubectl, [file], "--dry-run=server")
            create_objects(kubectl, [file])
        print(self._format_receipt(job, f"evaluates {evaluation.model}", file, kubectl))

    def _write_run_manifest(self, directory: Path, point: SweepPoint, job: JobSpec) -> Path:
        """Write the manifest of a point and its configuration; return the manifest's path."""
        directory.mkdir(parents=True)
        command_line = frozen_config.CommandLine([*point.overrides], self.hydra_flags)
        frozen_config.save_frozen_config(directory, point.composed, command_line)
        files = {file.name: file.read_text() for file in sorted(directory.iterdir())}
        graphs_dir = None
        if self.settings.precompile:
            graphs_dir = get_compiled_graphs_dir(point.config, job.working_directory)
        return write_manifest(directory, build_manifest(job, files, self.settings, graphs_dir))

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


def build_evaluation_manifest(
    evaluation: EvaluationJob, settings: KubernetesLauncherConfig
) -> list[dict[str, Any]]:
    """Return the YAML documents of an evaluation."""
    return build_manifest(_build_evaluation_job(evaluation, settings), {}, settings)


def _build_evaluation_job(evaluation: EvaluationJob, settings: KubernetesLauncherConfig) -> JobSpec:
    command = ("python", "-m", "hlat.evaluate", *evaluation.arguments)
    return build_evaluation_job(evaluation, command, Path(settings.mount))


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
