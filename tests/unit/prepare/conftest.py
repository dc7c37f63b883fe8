"""Fixtures shared with the tests of hlat.data."""

from tests.unit.data.conftest import (
    cache,
    corpora,
    embedded_folder,
    eos,
    make_documents,
    write_arrow,
)

__all__ = ["cache", "corpora", "embedded_folder", "eos", "make_documents", "write_arrow"]
