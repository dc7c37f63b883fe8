"""What was accepted by name goes on; what was not is refused (test_loader.py)."""

import json

import numpy as np
import pytest

from hlat.config.batch import Batch
from hlat.config.errors import ConfigError

ALPHA = {"alpha": 1.0}


@pytest.fixture
def begun(corpora, open_loader):
    """A loader some batches into documents of three sequences each, and its state."""
    corpora.write("alpha", [f"old{i} " * 40 for i in range(30)])
    loader = open_loader(corpora.data(ALPHA))
    for _ in range(4):
        loader.next()
    return loader, json.loads(json.dumps(loader.state()))


def test_a_changed_source_goes_on_with_its_next_document(begun, corpora, open_loader) -> None:
    _, state = begun
    corpora.write("alpha", [f"new{i} " * 40 for i in range(50)])
    key = "data.sources.alpha"
    with pytest.raises(
        ConfigError, match=r"accept it with 'data.allow_changed=\[data.sources.alpha\]'"
    ):
        open_loader(corpora.data(ALPHA)).restore(state)
    loader = open_loader(corpora.data(ALPHA, allow_changed=[key]))
    (line,) = loader.restore(state)
    assert line.startswith(f"{key}: the checkpoint was written with {{'files': 2, 'rows': 30")
    before = loader.ledger()["alpha"]
    for row in loader.next().tokens:
        assert loader.decode(row).startswith("new")
    assert before["tokens"] == 4 * 4 * 32
    assert loader.ledger()["alpha"]["tokens"] == 5 * 4 * 32


def test_a_sequence_length_may_change_within_a_document(begun, corpora, open_loader) -> None:
    whole, state = begun
    key = "batch.sequence_length"
    loader = open_loader(corpora.data(ALPHA, allow_changed=[key]), batch=Batch(4, 1, 16))
    assert [line.split(":")[0] for line in loader.restore(state)] == [key]
    found = np.concatenate([loader.next().tokens for _ in range(20)], axis=1)
    expected = np.concatenate([whole.next().tokens for _ in range(10)], axis=1)
    np.testing.assert_array_equal(found, expected)


def test_sources_may_come_and_go(begun, corpora, open_loader) -> None:
    _, state = begun
    keys = [f"data.sources.{name}" for name in ("alpha", "beta", "gamma")]
    loader = open_loader(corpora.data({"beta": 1.0, "gamma": 1.0}, allow_changed=keys))
    assert len(loader.restore(state)) == 3
    assert loader.ledger()["beta"] == {"tokens": 0, "documents": 0, "epochs": 0.0}
    for _ in range(3):
        loader.next()
    read = loader.ledger()
    assert sum(entry["tokens"] for entry in read.values()) == 3 * 128
    assert min(entry["tokens"] for entry in read.values()) > 128 - 4 * 32


def test_the_number_of_streams_can_never_change(begun, corpora, open_loader) -> None:
    _, state = begun
    key = "batch.global_batch_size"
    loader = open_loader(corpora.data(ALPHA, allow_changed=[key]), batch=Batch(2, 1, 32))
    with pytest.raises(ConfigError) as error:
        loader.restore(state)
    (problem,) = error.value.problems
    assert problem.endswith("restore the former, or start a new run")


def test_another_seed_is_another_order_from_the_next_document_on(
    begun, corpora, open_loader
) -> None:
    whole, state = begun
    loader = open_loader(corpora.data(ALPHA, allow_changed=["run.seed"]), seed=2)
    assert len(loader.restore(state)) == 1
    found, expected = loader.next().tokens, whole.next().tokens
    assert (found != expected).any()
    assert all(loader.decode(row).startswith("old") for row in found)
