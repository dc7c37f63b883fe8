"""What comes before anything of neuronx-distributed is imported, and what its device must be."""

import importlib.util
import os

from hlat import compiler
from hlat.config.errors import ConfigError
from hlat.config.precision import Rounding
from hlat.config.run import Config


def prepare(config: Config) -> None:
    """Set the variables that compiler, runtime and torch_xla read once, when they are imported.

    Raises:
        ConfigError: The libraries are not there.
    """
    needed = ("torch_xla", "neuronx_distributed")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"engine.name=nxd needs {' and '.join(missing)}, which this Python has not; install "
            "the Neuron SDK's PyTorch environment (docs/neuron.md), or use engine=native"
        )
    os.environ.update(compiler.environment(config.compiler, config.precision))


def check_device(config: Config) -> None:
    """Refuse to leave rounding to a device that does not do it.

    Raises:
        ConfigError: The recipe rounds stochastically, and this is no Trainium.
    """
    import torch_xla.runtime

    kind = torch_xla.runtime.device_type()
    if config.precision.rounding is Rounding.stochastic and kind != "NEURON":
        raise ConfigError(
            f"precision.rounding=stochastic is Trainium's with engine=nxd, and this is {kind}; use "
            "engine=native, which rounds by itself, or precision=mixed"
        )
