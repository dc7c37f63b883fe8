"""Classes that Hydra instantiates."""

from .kubernetes._kubernetes_launcher import KubernetesLauncher
from .local._local_launcher import LocalLauncher
from .search._search_sweeper import SearchSweeper
from .skypilot._skypilot_launcher import SkyPilotLauncher
from .slurm._slurm_launcher import SlurmLauncher

PLUGINS = (KubernetesLauncher, LocalLauncher, SearchSweeper, SkyPilotLauncher, SlurmLauncher)
