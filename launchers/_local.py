"""Runs the points of a sweep on this machine, one after the other, each in a process of its own.

A process per point keeps the points independent: one that diverges ends alone, and no state of the
machinery leaks from one into the next.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hlat.config.entry import users_environment
from hlat.config.errors import Exit

from ._points import check, flags


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
        """Remember what is swept."""
        self.context, self.config = hydra_context, config
        module = f"hlat.{config.hydra.job.name}"
        self.command = [sys.executable, "-m", module, *flags(config)]

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Check all points, run them one by one, and exit with the first failure's code.

        A point that fails does not stop the ones after it; one that was interrupted does.
        """
        check(self.context, self.config, job_overrides)
        codes: list[int] = []
        for i, point in enumerate(job_overrides):
            print(f"[{initial_job_idx + i}] {' '.join(point)}", flush=True)
            codes.append(self._run(point))
            if codes[-1] == Exit.PREEMPTED:
                break
        if any(codes):
            failed = sum(code != 0 for code in codes)
            print(f"hlat: {failed} of {len(job_overrides)} points failed", file=sys.stderr)
            sys.exit(next(code for code in codes if code))
        return [
            JobReturn(overrides=list(point), status=JobStatus.COMPLETED) for point in job_overrides
        ]

    def _run(self, point: Sequence[str]) -> int:
        """Run one point in a session of its own, so that a signal reaches it once, from here."""
        process = subprocess.Popen(
            [*self.command, *point], env=users_environment(), start_new_session=True
        )
        with _forwarding_to(process):
            return process.wait()


@contextlib.contextmanager
def _forwarding_to(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
