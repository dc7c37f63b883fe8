"""The one place that knows which engines exist."""

from hlat.config.engine import Backend
from hlat.config.run import Config
from hlat.engine.interface import Engine


def create_engine(config: Config) -> Engine:
    """Return the engine that the configuration names; only its libraries are imported.

    Raises:
        ConfigError: Its libraries are not there.
    """
    if config.engine.name is Backend.nxd:
        from hlat.engine.nxd import start

        start.prepare(config)
        from hlat.engine.nxd.engine import NxdEngine

        return NxdEngine()
    from hlat.engine.native.engine import NativeEngine

    return NativeEngine()
