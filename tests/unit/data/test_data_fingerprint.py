"""Test changes of the data that `data.allow_changed` accepts."""

import json

import pytest

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError

ALPHA = {"alpha": 1.0}


@pytest.fixture
def loader_and_state(corpora, open_loader):
    """Return a loader within documents of three sequences each, and its state."""
    corpora.write("alpha", [f"old{i} " * 40 for i in range(30)])
    loader = open_loader(corpora.data(ALPHA))
    for _ in range(4):
        loader.next_batch()
    return loader, json.loads(json.dumps(loader.state_dict()))


def test_accepted_source_continues_with_its_next_document(
    loader_and_state, corpora, open_loader
) -> None:
    _, state = loader_and_state
    corpora.write("alpha", [f"new{i} " * 40 for i in range(50)])
    key = "data.sources.alpha"
    with pytest.raises(
        ConfigError, match=r"accept it with 'data.allow_changed=\[data.sources.alpha\]'"
    ):
        open_loader(corpora.data(ALPHA)).load_state_dict(state)
    loader = open_loader(corpora.data(ALPHA, allow_changed=[key]))
    (line,) = loader.load_state_dict(state)
    assert line.startswith(f"{key}: the checkpoint was written with {{'files': 2, 'rows': 30")
    before = loader.compute_ledger()["alpha"]
    for row in loader.next_batch().tokens:
        assert loader._training_data.tokenizer.decode(row).startswith("new")
    assert before["tokens"] == 4 * 4 * 32
    assert loader.compute_ledger()["alpha"]["tokens"] == 5 * 4 * 32


def test_unknown_keys_are_an_error_that_lists_the_valid_ones(
    loader_and_state, corpora, open_loader
) -> None:
    _, state = loader_and_state
    loader = open_loader(corpora.data(ALPHA, allow_changed=["data.tokeniser"]))
    with pytest.raises(ConfigError) as error:
        loader.load_state_dict(state)
    assert error.value.problems == (
        "data.allow_changed: data.tokeniser is no key that a checkpoint could differ in; these are: "
        "data.eos_token, data.heldout_documents, data.sources.alpha, data.tokenizer, run.seed",
    )


def test_sources_can_be_added_and_removed(loader_and_state, corpora, open_loader) -> None:
    _, state = loader_and_state
    keys = [f"data.sources.{name}" for name in ("alpha", "beta", "gamma")]
    loader = open_loader(corpora.data({"beta": 1.0, "gamma": 1.0}, allow_changed=keys))
    assert len(loader.load_state_dict(state)) == 3
    assert loader.compute_ledger()["beta"] == {"tokens": 0, "documents": 0, "epochs": 0.0}
    for _ in range(3):
        loader.next_batch()
    read = loader.compute_ledger()
    assert sum(entry["tokens"] for entry in read.values()) == 3 * 128
    assert min(entry["tokens"] for entry in read.values()) > 128 - 4 * 32


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        ("batch.global_batch_size", BatchConfig(2, 1, 32)),
        ("batch.sequence_length", BatchConfig(4, 1, 16)),
    ],
)
def test_batch_size_and_sequence_length_cannot_change(
    loader_and_state, corpora, open_loader, key, batch
) -> None:
    """Stages start at steps, and streams are rows of the batch."""
    _, state = loader_and_state
    loader = open_loader(corpora.data(ALPHA, allow_changed=[key]), batch=batch)
    with pytest.raises(ConfigError) as error:
        loader.load_state_dict(state)
    (problem,) = error.value.problems
    assert problem.endswith("restore the former, or start a new run")


def test_accepted_seed_changes_the_order_of_the_next_documents(
    loader_and_state, corpora, open_loader
) -> None:
    uninterrupted, state = loader_and_state
    loader = open_loader(corpora.data(ALPHA, allow_changed=["run.seed"]), seed=2)
    assert len(loader.load_state_dict(state)) == 1
    found, expected = loader.next_batch().tokens, uninterrupted.next_batch().tokens
    assert (found != expected).any()
    assert all(loader._training_data.tokenizer.decode(row).startswith("old") for row in found)
