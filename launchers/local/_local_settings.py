"""Settings of the local launcher, which are part of each configuration."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from hlat.config.bounds import bounded

from .._pruning_settings import PruningConfig


@dataclass
class LocalLauncherConfig(PruningConfig):
    """Resources of concurrent runs."""

    _target_: str = "hydra_plugins.hlat_launchers.local._local_launcher.LocalLauncher"
    jobs: int = bounded(1, min=1)
    """Maximum number of concurrent runs, within the budget. 1: each run has the whole machine."""
    cores: int | None = bounded(None, min=1)
    """Cores of all concurrent runs; null: the cores available to this process."""
    memory_gib: float | None = bounded(None, above=0)
    """Main memory of all concurrent runs, as estimated by the planner; null: the machine's."""


ConfigStore.instance().store(
    group="hydra/launcher", name="local", node=LocalLauncherConfig, provider="hlat"
)
