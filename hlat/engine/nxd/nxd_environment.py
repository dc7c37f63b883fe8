"""Environment and device requirements of neuronx-distributed."""

import importlib.util
import os

from hlat import neuron_environment
from hlat.config.config_errors import ConfigError
from hlat.config.precision import RoundingMode
from hlat.config.run import Config


def prepare_nxd_environment(config: Config) -> None:
    """Set the variables that compiler, runtime and torch_xla read when they are imported.

    Raises:
        ConfigError: The libraries are not installed.
    """
    required = ("torch_xla", "neuronx_distributed")
    missing = [name for name in required if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"engine.name=nxd needs {' and '.join(missing)}, which this Python has not; install "
            "the Neuron SDK's PyTorch environment (docs/neuron.md), or use engine=native"
        )
    variables = neuron_environment.build_neuron_environment(config.compiler, config.precision)
    os.environ.update(variables)


def validate_device(config: Config) -> None:
    """Raise ConfigError if the recipe rounds stochastically and the device is not a Trainium."""
    import torch_xla.runtime

    device_type = torch_xla.runtime.device_type()
    if config.precision.rounding is RoundingMode.stochastic and device_type != "NEURON":
        raise ConfigError(
            f"precision.rounding=stochastic is Trainium's with engine=nxd, and this is "
            f"{device_type}; use engine=native, which rounds by itself, or precision=mixed"
        )
