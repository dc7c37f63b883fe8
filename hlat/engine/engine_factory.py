"""Selection of the engine by configuration."""

import importlib.util
import os

from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.run import Config
from hlat.engine.interface import Engine
from hlat.engine.neuron import neuron_environment

_SDK_MODULES = ("torch_xla", "neuronx_distributed")
_UNDECLARED_MODULES = ("boto3", "transformers")
"""Modules that neuronx_distributed imports without declaring them as dependencies."""


def create_engine(config: Config) -> Engine:
    """Return the configured engine; only its libraries are imported.

    Raises:
        ConfigError: Its libraries are not installed.
    """
    if config.engine.name is EngineBackend.nxd:
        _prepare_nxd_environment(config)
        from hlat.engine.nxd.nxd_engine import NxdEngine

        return NxdEngine()
    from hlat.engine.native.native_engine import NativeEngine

    return NativeEngine()


def _prepare_nxd_environment(config: Config) -> None:
    """Set the variables that compiler, runtime and torch_xla read when they are imported."""
    for required, remedy in (
        (_SDK_MODULES, "the Neuron SDK's PyTorch environment (docs/neuron.md)"),
        (_UNDECLARED_MODULES, "'hlat[nxd]', which neuronx_distributed does not declare"),
    ):
        missing = [name for name in required if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"engine.name=nxd needs {' and '.join(missing)}, which this Python has not; "
                f"install {remedy}, or use engine=native"
            )
    os.environ.update(
        neuron_environment.build_neuron_environment(config.compiler, config.precision)
    )
