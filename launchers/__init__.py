"""hlat's Hydra launchers and its sweeper, installed as hydra_plugins.hlat_launchers.

The code lies in modules with a leading underscore: Hydra 1.3 executes every other module of a
plugin package a second time, which would register two classes of one name.
"""

from ._kubernetes import KubernetesLauncher
from ._local import LocalLauncher
from ._search import Search
from ._slurm import SlurmLauncher

PLUGINS = (KubernetesLauncher, LocalLauncher, Search, SlurmLauncher)
