"""hlat's Hydra launchers and sweeper, installed as hydra_plugins.hlat_launchers.

The code is in modules with a leading underscore: Hydra 1.3 executes all other modules of a plugin
package twice, which would register two classes with the same name.
"""

from .kubernetes._kubernetes_launcher import KubernetesLauncher
from .local._local_launcher import LocalLauncher
from .search._search_sweeper import SearchSweeper
from .skypilot._skypilot_launcher import SkyPilotLauncher
from .slurm._slurm_launcher import SlurmLauncher

PLUGINS = (KubernetesLauncher, LocalLauncher, SearchSweeper, SkyPilotLauncher, SlurmLauncher)
