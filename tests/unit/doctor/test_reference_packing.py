"""The reference packs documents with delimiters, and takes turns between sources."""

import numpy as np
import pytest

from hlat.config.resolve import resolve_config
from hlat.doctor.reference_packing import Delimiters, pack_stream

OVERRIDES = [
    "batch.global_batch_size=2",
    "batch.micro_batch_size=2",
    "batch.sequence_length=4",
    *("data.sources.code.weight=1", "data.sources.data.weight=0", "data.sources.prose.weight=0"),
]
BOS, EOS = 1, 2


@pytest.fixture
def config(compose):
    return lambda *overrides: resolve_config(compose(*OVERRIDES, *overrides))


def read(lengths):
    """Return a reader of documents that consist of their position plus 10."""
    return lambda source, position: np.full(lengths[position], 10 + position, np.int32)


def test_stream_reads_every_second_document_between_delimiters(config) -> None:
    lengths = {1: 3, 3: 0, 5: 1, 7: 9}  # the third document of the stream is empty
    tokens, documents, num_ended = pack_stream(config(), 1, 3, Delimiters(BOS, EOS), read(lengths))
    assert tokens.tolist() == [[BOS, 11, 11, 11], [EOS, BOS, 15, EOS], [BOS, 17, 17, 17]]
    assert documents.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert num_ended == 2


def test_long_documents_alternate_with_another_source(config) -> None:
    run = config("data.sources.prose.weight=1")

    def read(source, position):
        return np.full(1000, {"code": 5, "prose": 6}[source], np.int32)

    tokens, _, num_ended = pack_stream(run, 0, 12, Delimiters(None, EOS), read)
    assert tokens[:, 0].tolist() == [5] * 4 + [6] * 4 + [5] * 4
    assert (tokens == tokens[:, :1]).all()
    assert num_ended == 0
    # The other stream starts with the other half of the mixture
    assert pack_stream(run, 1, 1, Delimiters(None, EOS), read)[0].tolist() == [[6] * 4]
