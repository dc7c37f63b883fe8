"""Garbage collection during the imports of a run.

A full collection traverses all objects, and imported modules have hundreds of thousands of them.
They are no garbage, so collections exclude them, also during training.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage within the context, and exclude its modules from later collections.

    Without an import, as in further runs of a process, no object is excluded, since it could be
    garbage of an earlier run.
    """
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        gc.enable()
