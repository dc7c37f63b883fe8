"""Selection of the engine by configuration."""

from hlat.config.engine import EngineBackend
from hlat.config.run import Config
from hlat.engine.interface import Engine


def create_engine(config: Config) -> Engine:
    """Return the configured engine; only its libraries are imported.

    Raises:
        ConfigError: Its libraries are not installed.
    """
    if config.engine.name is EngineBackend.nxd:
        from hlat.engine.nxd import nxd_environment

        nxd_environment.prepare_nxd_environment(config)
        from hlat.engine.nxd.nxd_engine import NxdEngine

        return NxdEngine()
    from hlat.engine.native.native_engine import NativeEngine

    return NativeEngine()
