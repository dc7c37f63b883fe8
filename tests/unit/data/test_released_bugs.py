"""Test for each bug of the data loader that the paper's authors released; docstrings state the bugs.

benchmarks/data/released_loader.md lists them.
"""

import json
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from hlat.checkpoint import checkpoint_store
from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.data.data_loader import merge_state_dicts
from hlat.data.permutation import Permutation

S, LENGTH = 4, 32


def read_streams(loader, steps):
    """Return the token ids of each stream, [S, steps * LENGTH]."""
    return np.concatenate([loader.next_batch().tokens for _ in range(steps)], axis=1)


def copy_state(loader):
    return json.loads(json.dumps(loader.state_dict()))


def decode_documents(loader, row):
    """Return the complete documents in a part of a stream."""
    return loader._training_data.tokenizer.decode(row).split("<|endoftext|>")[:-1]


@pytest.fixture
def one_source(corpora, open_loader):
    """Build a loader over one source with three held-out documents."""

    def open_(documents, **changes):
        if corpora.documents["alpha"] != documents:  # a loader may be reading the files
            corpora.write("alpha", documents)
        data = {key: changes.pop(key) for key in list(changes) if hasattr(corpora.data(), key)}
        return open_loader(corpora.data({"alpha": 1.0}, **data), **changes)

    return open_


def test_01_resume_within_a_document_returns_a_regular_batch(one_source) -> None:
    """Remaining buffers were restored as lists of ids, which crashed the trainer."""
    first, resumed = one_source(["long story " * 900] * 9), one_source(["long story " * 900] * 9)
    first.next_batch()
    resumed.load_state_dict(copy_state(first))
    batch = resumed.next_batch().tokens
    assert (batch.shape, batch.dtype) == ((S, LENGTH), np.int32)
    np.testing.assert_array_equal(batch, first.next_batch().tokens)


def test_02_text_without_spaces_is_measured_in_tokens(one_source) -> None:
    """Buffers were measured in words: one batch required 4,096 documents without spaces."""
    loader = one_source([f"{i}木曜日は晴れ" * 60 for i in range(40)])
    read_streams(loader, 3)
    assert loader.compute_ledger()["alpha"]["documents"] <= S


@pytest.mark.slow
def test_03_long_documents_are_read_in_order(one_source) -> None:
    """Documents over 500,000 characters were split anywhere, last part first, with EOS between."""
    document = " ".join(f"word{i}" for i in range(70_000))
    assert len(document) > 500_000
    loader = one_source([document] * 7, batch=BatchConfig(1, 1, 4096))
    (expected,) = loader._training_data.tokenizer.encode([document])
    (found,) = read_streams(loader, len(expected) // 4096)
    np.testing.assert_array_equal(found, expected[: len(found)])


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_04_resume_preserves_the_order_in_any_epoch(one_source, epoch: int) -> None:
    """Shuffling differed after a resume from the third epoch on."""
    documents = [f"document {i}" for i in range(43)]
    uninterrupted, resumed = one_source(documents), one_source(documents)
    while uninterrupted.compute_ledger()["alpha"]["epochs"] < epoch + 0.4:
        uninterrupted.next_batch()
    resumed.load_state_dict(copy_state(uninterrupted))
    np.testing.assert_array_equal(read_streams(resumed, 20), read_streams(uninterrupted, 20))


def test_05_restarts_drop_no_tokens(one_source) -> None:
    """Restarts dropped the tokens in buffers: 24,000 per rank."""
    documents = [f"document {i} is of some length" for i in range(60)]
    rows, state = [], None
    for _ in range(12):
        loader = one_source(documents)
        if state is not None:
            loader.load_state_dict(state)
        rows.append(loader.next_batch().tokens)
        state = copy_state(loader)
    for row in np.concatenate(rows, axis=1):
        assert set(decode_documents(loader, row)) <= set(documents)


@pytest.mark.slow
def test_06_checkpoint_contains_the_data_state_of_its_step(small, hlat, tmp_path) -> None:
    """Automatic resumes did not restore the data state and read from the start."""
    assert hlat("train", *small, "run.name=x", "run.steps=7", "checkpoint.every_steps=3").returncode == 0  # fmt: skip
    for folder in sorted((tmp_path / "runs/x/checkpoints").iterdir()):
        state = checkpoint_store.load_state_json(folder)
        assert state["data"]["step"] == state["step"] == int(folder.name.removeprefix("step_"))


def test_07_resume_with_another_number_of_ranks(corpora, open_loader) -> None:
    """State was stored per rank, and only twice as many ranks could restore it."""
    expected = read_streams(open_loader(corpora.data()), 9)
    found, state = [], None
    for num_ranks in (4, 1, 2):
        ranks = [
            open_loader(corpora.data(), dp_rank=r, dp_world_size=num_ranks)
            for r in range(num_ranks)
        ]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        rows = np.empty((S, 3 * LENGTH), np.int32)
        for rank, loader in enumerate(ranks):
            rows[rank::num_ranks] = read_streams(loader, 3)
        found.append(rows)
        state = merge_state_dicts([loader.state_dict() for loader in ranks])
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)


@pytest.mark.parametrize("change", ["length", "order", "content", "tokenizer"])
def test_08_resume_with_other_data_is_rejected(one_source, corpora, tmp_path, change) -> None:
    """Changed files or tokenizers were not detected and read from the middle."""
    documents = [f"document {i}" for i in range(20)]
    before = one_source(documents)
    data = {}
    if change == "tokenizer":
        file = tmp_path / "tokenizer.json"
        file.write_text(before._training_data.tokenizer._backend_tokenizer.to_str(pretty=True))
        data["tokenizer"] = str(file)
    changed = {
        "length": documents[:-1],
        "order": documents[::-1],
        "content": [*documents[:-1], "document 99"],
        "tokenizer": documents,
    }[change]
    after = one_source(changed, **data)
    with pytest.raises(ConfigError, match="the checkpoint was written with"):
        after.load_state_dict(copy_state(before))


@pytest.mark.parametrize("every", [0, -1])
def test_09_invalid_checkpoint_interval_is_rejected(compose, every: int) -> None:
    """Saves of the data state occurred in every step with a frequency of -1; 0 divided by zero."""
    with pytest.raises(ConfigError, match=f"checkpoint.every_steps={every} is too small"):
        resolve_config(compose(f"checkpoint.every_steps={every}"))


def test_10_loading_requires_no_collectives() -> None:
    """Barriers of all ranks in a thread of the iterator could deadlock."""
    program = "import sys, hlat.data.data_loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_11_state_excludes_prefetched_batches(corpora, open_loader) -> None:
    """State was saved when a batch was fetched, before the step and without the model."""
    eager, lazy = open_loader(corpora.data(prefetch=5)), open_loader(corpora.data())
    for _ in range(4):
        eager.next_batch()
        lazy.next_batch()
        assert eager.state_dict() == lazy.state_dict()


def test_12_seed_determines_the_first_epoch_without_global_generators(one_source) -> None:
    """Seeds did not change the first epoch, and NumPy's global generator was reseeded."""
    documents = [f"document {i}" for i in range(99)]
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)
    one, other = (read_streams(one_source(documents, seed=seed), 8) for seed in (1, 2))
    assert np.random.random() == expected
    assert (one != other).mean() > 0.1


def test_13_order_of_ten_billion_documents_uses_no_memory() -> None:
    """Processes stored, sliced and saved all indices as lists of Python integers."""
    tracemalloc.start()
    order = Permutation(10**10, ("epoch", 1, "web", 0))
    images = {order(i) for i in range(0, 10**10, 10**8)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(images) == 100
    assert peak < 50_000


@pytest.mark.parametrize("length", [16, 48, 8192])
def test_14_sequence_length_is_the_configured_one(corpora, open_loader, length: int) -> None:
    """Sequences had 4,096 tokens for any value of the option."""
    assert open_loader(
        corpora.data(), batch=BatchConfig(S, 1, length)
    ).next_batch().tokens.shape == (
        S,
        length,
    )


def test_15_evaluations_read_the_same_documents(corpora, open_loader) -> None:
    """Validation continued at its last position, so each evaluation read other data."""
    loader = open_loader(corpora.data(heldout_documents=8))
    before = loader.build_heldout_sequences(3)
    state = loader.state_dict()
    read_streams(loader, 5)
    after = loader.build_heldout_sequences(3)
    for name, held in before.items():
        np.testing.assert_array_equal(held.sequences.tokens, after[name].sequences.tokens)
    fresh = open_loader(corpora.data(heldout_documents=8))
    assert fresh.state_dict() == state


def test_16_directories_files_and_invalid_files(corpora, open_loader) -> None:
    """Directories crashed in a check before the test for directories."""
    data = corpora.data()
    folder = read_streams(open_loader(data), 3)
    data.sources["alpha"].paths = ["alpha/a.arrow", "alpha/b.arrow"]
    np.testing.assert_array_equal(read_streams(open_loader(data), 3), folder)
    data.sources["alpha"].paths = ["alpha/*.arrow"]
    np.testing.assert_array_equal(read_streams(open_loader(data), 3), folder)
    (corpora.root / "alpha/c.arrow").write_bytes(b"not Arrow at all")
    with pytest.raises(ConfigError, match=r"alpha/c\.arrow: not a whole Arrow or Parquet file"):
        open_loader(data)


def test_17_mixture_is_identical_on_all_ranks_over_several_epochs(corpora, open_loader) -> None:
    """Interleaving used an unseeded generator per rank and ended with the shortest source."""
    data = corpora.data({"alpha": 0.1, "gamma": 0.9})
    expected = read_streams(open_loader(data), 60)
    ranks = [open_loader(data, dp_rank=r, dp_world_size=2) for r in range(2)]
    for rank, loader in enumerate(ranks):
        np.testing.assert_array_equal(read_streams(loader, 60), expected[rank::2])
    assert sum(loader.compute_ledger()["gamma"]["epochs"] for loader in ranks) > 2


def test_18_order_is_stable(one_source) -> None:
    """Row assignment to ranks, and thus the order, changed with a default of a library."""
    loader = one_source([f"{i}" for i in range(20)])
    found = [decode_documents(loader, row)[:6] for row in read_streams(loader, 1)]
    assert found == ORDER


ORDER = [
    ["19", "17", "15", "1", "14", "13"],
    ["8", "0", "4", "11", "17", "19"],
    ["6", "16", "13", "10", "5", "16"],
    ["5", "9", "2", "12", "6", "1"],
]


def test_19_epochs_are_counted(one_source) -> None:
    """Logged epochs were always zero because the iterator did not end."""
    loader = one_source([f"document {i}" for i in range(13)], warn_epochs=2.5)
    epochs, warnings = [], []
    for _ in range(30):
        loader.next_batch()
        epochs.append(loader.compute_ledger()["alpha"]["epochs"])
        warnings += loader.epoch_warnings()
    assert epochs == sorted(epochs)
    assert epochs[-1] > 3
    assert len(warnings) == 1
    assert re.match(r"data\.sources\.alpha has been read [3-5]\.\d times, more than", warnings[0])


def test_20_document_boundaries_are_available_as_ids(one_source) -> None:
    """Boundaries were discarded: attention and loss across documents could not be disabled."""
    documents = [f"document {i}" for i in range(13)]
    batch = one_source(documents, document_mask=True, loss_mask=True).next_batch()
    ends = batch.tokens == one_source(documents).eos_token_id
    assert batch.document_ids is not None
    np.testing.assert_array_equal(np.diff(batch.document_ids, axis=1), ends[:, :-1])
