"""Runs the points of a sweep on this machine, one after the other, each in a process of its own.

A process per point keeps the points independent: one that diverges or is refused ends alone, and no
state of the machinery leaks from one into the next.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config.entry import users_environment


@dataclass
class LocalLauncherConfig:
    """Settings of the local launcher: none."""

    _target_: str = "hydra_plugins.hlat_launchers._local.LocalLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="local", node=LocalLauncherConfig, provider="hlat"
)


class LocalLauncher(Launcher):
    """Hydra launcher that starts `python -m hlat.<entry> <overrides>` for every point."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember which entry is swept."""
        self.entry = f"hlat.{config.hydra.job.name}"
        self.hydra_overrides = [
            override
            for override in OmegaConf.to_object(config.hydra.overrides.hydra)
            if not override.startswith("hydra.mode=")
        ]

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every point; exit with the first failure's code after all have run."""
        codes = [self._run(point, initial_job_idx + i) for i, point in enumerate(job_overrides)]
        if any(codes):
            failed = sum(code != 0 for code in codes)
            print(f"hlat: {failed} of {len(codes)} points failed", file=sys.stderr)
            sys.exit(next(code for code in codes if code))
        return [
            JobReturn(overrides=list(point), status=JobStatus.COMPLETED) for point in job_overrides
        ]

    def _run(self, point: Sequence[str], index: int) -> int:
        print(f"[{index}] {' '.join(point)}", flush=True)
        command = [sys.executable, "-m", self.entry, *point, *self.hydra_overrides]
        return subprocess.run(command, env=users_environment()).returncode
