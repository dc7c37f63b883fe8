"""Collections after the imports of a run exclude their objects."""

import gc
import importlib
import sys

import pytest

from hlat.recovery.garbage_collection import pause_garbage_collection


@pytest.fixture(autouse=True)
def _include_all_objects_again():
    yield
    gc.unfreeze()


def test_objects_of_imported_modules_are_excluded(tmp_path, monkeypatch):
    (tmp_path / "module_with_lists.py").write_text("lists = [[i] for i in range(1000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        assert not gc.isenabled()
        importlib.import_module("module_with_lists")
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + 1000
    del sys.modules["module_with_lists"]


def test_objects_are_collected_without_an_import():
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        objects = [[number] for number in range(1000)]
    assert gc.get_freeze_count() == before
    assert len(objects) == 1000


def test_collections_continue_after_an_error():
    with pytest.raises(ImportError), pause_garbage_collection():
        raise ImportError
    assert gc.isenabled()
