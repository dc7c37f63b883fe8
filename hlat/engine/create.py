"""The one place that knows which engines exist."""

from hlat.config.engine import Backend
from hlat.config.engine import Engine as EngineConfig
from hlat.engine.interface import Engine


def create_engine(config: EngineConfig) -> Engine:
    """Return the engine that the configuration names; only its libraries are imported.

    Raises:
        ValueError: This version has no such engine (the rules refuse it earlier).
    """
    if config.name is Backend.native:
        from hlat.engine.native.engine import NativeEngine

        return NativeEngine()
    raise ValueError(f"engine.name={config.name.value} cannot execute runs in this version of hlat")
