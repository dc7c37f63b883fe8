"""hlat: composable pre-training experiments on large language models.

`hlat train` composes a configuration from groups and trains with native PyTorch or
neuronx-distributed. `hlat.runs` and `hlat.load_run` read recorded runs (hlat/api.py). They are
imported when they are used, so that composing a configuration is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlat.api import Run, load_run, runs

__all__ = ["Run", "load_run", "runs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("hlat.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
