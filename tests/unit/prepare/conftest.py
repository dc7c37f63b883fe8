"""Fixtures shared with the tests of hlat.data."""

from tests.unit.data.conftest import cache, make_documents, write_arrow

__all__ = ["cache", "make_documents", "write_arrow"]
