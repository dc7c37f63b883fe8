"""Garbage collection during the imports of a run.

A full collection traverses all objects, and the modules of torch have a million of them. They are
no garbage, so they are excluded from collections, at the start and during training.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage within the context, and exclude its objects from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
