"""Sends every point of a sweep to Kubernetes as a manifest of its own, and returns with receipts.

All points are composed, resolved, planned and written, and the cluster has looked at all manifests,
before the first one is created. Where there is no kubectl, they are written and that is all. An
evaluation is one manifest.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import frozen
from hlat.config.errors import ConfigError
from hlat.jobs.evaluation import Evaluation

from ._job import Job, compiled, evaluation_job, job
from ._manifest import COMMAND, Settings, manifest, name_of, pods, refuse_settings
from ._points import Point, check, grouped, record, returned
from ._sender import Sender
from ._yaml import as_yaml

_MANIFEST = "manifest.yaml"


@dataclass
class KubernetesLauncherConfig(Settings):
    """How jobs are sent to Kubernetes."""

    _target_: str = "hydra_plugins.hlat_launchers._kubernetes.KubernetesLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="kubernetes", node=KubernetesLauncherConfig, provider="hlat"
)


class KubernetesLauncher(Sender):
    """Hydra launcher that writes manifests, creates what they say, and waits for nothing."""

    name, schema, sees_files = "kubernetes", Settings, False
    settings: Settings

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Check all points, create their objects, and print and return a receipt for each.

        Raises:
            ConfigError: A point cannot run, or the cluster would refuse its manifest. Nothing was
                created then, unless the cluster has changed since it was asked.
        """
        refuse_settings(self.settings)
        points = check(self.context, self.config, job_overrides, self.settings.prune)
        root = Path(self.config.hydra.sweep.dir)
        group = grouped(root, points)
        jobs = [self._job(point, group) for point in points]
        files = [
            write(root / name_of(of.name), point, of, self.settings, self.flags)
            for point, of in zip(points, jobs, strict=True)
        ]
        kubectl = shutil.which("kubectl")
        if kubectl is not None:
            options = [word for file in files for word in ("-f", str(file))]
            create(kubectl, ["--dry-run=server", *options])
        done = []
        for i, (of, file) in enumerate(zip(jobs, files, strict=True)):
            if kubectl is not None:
                create(kubectl, ["-f", str(file)])
            number, name = initial_job_idx + i, name_of(of.name)
            print(
                f"[{number}] {self._told(of, f'trains {of.run_folder}', file, kubectl)}", flush=True
            )
            receipt = {"name": name, "run_folder": str(of.run_folder), "manifest": str(file)}
            record(root, number, points[i], of.run_folder)
            done.append(returned(points[i], number, name, receipt))
        return done

    def evaluate(self, evaluation: Evaluation, folder: Path) -> None:
        """Create what an evaluation needs, once the cluster has looked at it, and print a receipt.

        Raises:
            ConfigError: The cluster would refuse it, as it does what it has already.
        """
        refuse_settings(self.settings)
        self.refuse_pruning()
        of = _evaluation_job(evaluation, self.settings)
        documents = evaluation_manifest(evaluation, self.settings)
        file = write_manifest(folder / name_of(of.name), documents)
        kubectl = shutil.which("kubectl")
        if kubectl is not None:
            create(kubectl, ["--dry-run=server", "-f", str(file)])
            create(kubectl, ["-f", str(file)])
        print(self._told(of, f"evaluates {evaluation.model}", file, kubectl))

    def _job(self, point: Point, variables: dict[str, str]) -> Job:
        made = job(point.config, COMMAND, Path(self.settings.mount))
        return replace(made, environment=variables | made.environment)

    def _told(self, of: Job, does: str, file: Path, kubectl: str | None) -> str:
        if kubectl is None:
            return f"{file} {does}; send it:  {shlex.join(_create(file))}"
        where = ("--namespace", self.settings.namespace)
        follow = ("kubectl", "logs", "--follow", *where, "--selector", pods(of, self.settings))
        return (
            f"{self.settings.kind.value} {name_of(of.name)} {does}\n"
            f"    follow it:  {shlex.join(follow)}\n"
            f"    end it:     {shlex.join(('kubectl', 'delete', '-f', str(file)))}"
        )


def write(folder: Path, point: Point, of: Job, settings: Settings, words: list[str]) -> Path:
    """Write the manifest of a point, and beside it the configuration that it holds; return it."""
    folder.mkdir(parents=True)
    frozen.save(folder, point.composed, frozen.Words([*point.overrides], words))
    files = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    shared = compiled(point.config, of.working_directory) if settings.precompile else None
    documents = manifest(of, point.config.hardware.host_memory_gib, files, settings, shared)
    return write_manifest(folder, documents)


def evaluation_manifest(evaluation: Evaluation, settings: Settings) -> list[dict[str, Any]]:
    """Return the documents of an evaluation."""
    memory = evaluation.config.hardware.host_memory_gib
    return manifest(_evaluation_job(evaluation, settings), memory, {}, settings)


def _evaluation_job(evaluation: Evaluation, settings: Settings) -> Job:
    words = ("python", "-m", "hlat.evaluate", *evaluation.words)
    return evaluation_job(evaluation, words, Path(settings.mount))


def write_manifest(folder: Path, documents: list[dict[str, Any]]) -> Path:
    """Write the documents of a job into a folder, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MANIFEST).write_text(as_yaml(*documents))
    return folder / _MANIFEST


def create(kubectl: str, options: list[str]) -> None:
    """Let kubectl create what manifests say.

    Raises:
        ConfigError: The cluster refuses it, has objects of these names, or does not answer.
    """
    done = subprocess.run([kubectl, "create", *options], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it exits with {done.returncode}"]
        raise ConfigError(*(f"kubectl create: {line}" for line in lines))


def _create(file: Path) -> tuple[str, ...]:
    return ("kubectl", "create", "-f", str(file))
