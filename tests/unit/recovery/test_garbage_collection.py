"""Collections after the imports of a run exclude their objects."""

import gc

import pytest

from hlat.recovery.garbage_collection import pause_garbage_collection


def test_objects_of_the_context_are_excluded_from_collections():
    before = gc.get_freeze_count()
    try:
        with pause_garbage_collection():
            assert not gc.isenabled()
            objects = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(objects)
    finally:
        gc.unfreeze()


def test_collections_continue_after_an_error():
    try:
        with pytest.raises(ImportError), pause_garbage_collection():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
