"""One test for each bug of the loader that the paper's authors released: it would have caught it.

benchmarks/data/released_loader.md lists the bugs, which were found by reading and running that
loader.
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


def streams(loader, steps):
    """Return the token ids of each stream, [S, steps * LENGTH]."""
    return np.concatenate([loader.next_batch().tokens for _ in range(steps)], axis=1)


def through_json(loader):
    return json.loads(json.dumps(loader.state_dict()))


def texts_of(loader, row):
    """Return the complete documents in a part of a stream."""
    return loader._training_data.tokenizer.decode(row).split("<|endoftext|>")[:-1]


@pytest.fixture
def one_source(corpora, open_loader):
    """Build a loader over one source with three held-out documents."""

    def open_(texts, **changes):
        if corpora.documents["alpha"] != texts:  # a loader may be reading the files
            corpora.write("alpha", texts)
        data = {key: changes.pop(key) for key in list(changes) if hasattr(corpora.data(), key)}
        return open_loader(corpora.data({"alpha": 1.0}, **data), **changes)

    return open_


def test_01_a_resume_within_a_document_returns_a_batch_like_any_other(one_source) -> None:
    """A buffer left over at a restart came back as a list of ids, and crashed the trainer."""
    first, again = one_source(["long story " * 900] * 9), one_source(["long story " * 900] * 9)
    first.next_batch()
    again.load_state_dict(through_json(first))
    batch = again.next_batch().tokens
    assert (batch.shape, batch.dtype) == ((S, LENGTH), np.int32)
    np.testing.assert_array_equal(batch, first.next_batch().tokens)


def test_02_text_without_spaces_fills_as_many_batches_as_it_has_tokens(one_source) -> None:
    """Words were counted for tokens: 4,096 documents without spaces were read for one batch."""
    loader = one_source([f"{i}木曜日は晴れ" * 60 for i in range(40)])
    streams(loader, 3)
    assert loader.compute_ledger()["alpha"]["documents"] <= S


def test_03_a_giant_comes_in_one_piece_head_first(one_source) -> None:
    """Documents over 500,000 characters were cut anywhere, tail first, with an eos in each cut."""
    giant = " ".join(f"word{i}" for i in range(70_000))
    assert len(giant) > 500_000
    loader = one_source([giant] * 7, batch=BatchConfig(1, 1, 4096))
    (expected,) = loader._training_data.tokenizer.encode([giant])
    (found,) = streams(loader, len(expected) // 4096)
    np.testing.assert_array_equal(found, expected[: len(found)])


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_04_a_resume_in_any_epoch_keeps_the_order(one_source, epoch: int) -> None:
    """Epochs from the third on were shuffled otherwise after a resume than without one."""
    texts = [f"document {i}" for i in range(43)]
    whole, again = one_source(texts), one_source(texts)
    while whole.compute_ledger()["alpha"]["epochs"] < epoch + 0.4:
        whole.next_batch()
    again.load_state_dict(through_json(whole))
    np.testing.assert_array_equal(streams(again, 20), streams(whole, 20))


def test_05_no_restart_drops_the_head_of_a_document(one_source) -> None:
    """What was tokenised but not yet used was thrown away at each restart: 24,000 tokens a rank."""
    texts = [f"document {i} is of some length" for i in range(60)]
    rows, state = [], None
    for _ in range(12):
        loader = one_source(texts)
        if state is not None:
            loader.load_state_dict(state)
        rows.append(loader.next_batch().tokens)
        state = through_json(loader)
    for row in np.concatenate(rows, axis=1):
        assert set(texts_of(loader, row)) <= set(texts)


@pytest.mark.slow
def test_06_a_checkpoint_holds_the_data_state_of_its_own_step(small, hlat, tmp_path) -> None:
    """The automatic resume never restored the data: every restart read from the beginning."""
    assert hlat("train", *small, "run.name=x", "run.steps=7", "checkpoint.every_steps=3").returncode == 0  # fmt: skip
    for folder in sorted((tmp_path / "runs/x/checkpoints").iterdir()):
        state = checkpoint_store.load_state_json(folder)
        assert state["data"]["step"] == state["step"] == int(folder.name.removeprefix("step_"))


def test_07_any_number_of_ranks_goes_on_where_any_other_left(corpora, open_loader) -> None:
    """State belonged to a rank: other numbers of ranks than twice as many were impossible."""
    expected = streams(open_loader(corpora.data()), 9)
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
            rows[rank::num_ranks] = streams(loader, 3)
        found.append(rows)
        state = merge_state_dicts([loader.state_dict() for loader in ranks])
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)


@pytest.mark.parametrize("change", ["length", "order", "content", "tokenizer"])
def test_08_other_data_is_never_resumed_unawares(one_source, corpora, tmp_path, change) -> None:
    """Nothing identified the data: another list of files or tokenizer was read from mid-way."""
    texts = [f"document {i}" for i in range(20)]
    before = one_source(texts)
    data = {}
    if change == "tokenizer":
        file = tmp_path / "tokenizer.json"
        file.write_text(before._training_data.tokenizer._backend_tokenizer.to_str(pretty=True))
        data["tokenizer"] = str(file)
    changed = {
        "length": texts[:-1],
        "order": texts[::-1],
        "content": [*texts[:-1], "document 99"],
        "tokenizer": texts,
    }[change]
    after = one_source(changed, **data)
    with pytest.raises(ConfigError, match="the checkpoint was written with"):
        after.load_state_dict(through_json(before))


@pytest.mark.parametrize("every", [0, -1])
def test_09_a_frequency_that_is_none_is_refused(compose, every: int) -> None:
    """A frequency of -1 saved the data state in every step, and 0 divided by zero."""
    with pytest.raises(ConfigError, match=f"checkpoint.every_steps={every} is too small"):
        resolve_config(compose(f"checkpoint.every_steps={every}"))


def test_10_loading_meets_no_other_rank() -> None:
    """A rendezvous of all ranks inside the iterator, in a thread, could lock them all up."""
    program = "import sys, hlat.data.data_loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_11_state_is_of_what_was_consumed_not_of_what_was_fetched(corpora, open_loader) -> None:
    """The state was written when a batch was fetched, before the step, beside no model."""
    eager, lazy = open_loader(corpora.data(prefetch=5)), open_loader(corpora.data())
    for _ in range(4):
        eager.next_batch()
        lazy.next_batch()
        assert eager.state_dict() == lazy.state_dict()


def test_12_the_seed_decides_the_first_epoch_and_no_global_generator_is_touched(one_source) -> None:
    """The first epoch's order was fixed whatever the seed, by reseeding NumPy's own generator."""
    texts = [f"document {i}" for i in range(99)]
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)
    one, other = (streams(one_source(texts, seed=seed), 8) for seed in (1, 2))
    assert np.random.random() == expected
    assert (one != other).mean() > 0.1


def test_13_the_order_of_ten_billion_documents_takes_no_memory() -> None:
    """Every process held a list of all indices, and sliced and saved lists of Python integers."""
    tracemalloc.start()
    order = Permutation(10**10, ("epoch", 1, "web", 0))
    drawn = {order(i) for i in range(0, 10**10, 10**8)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(drawn) == 100
    assert peak < 50_000


@pytest.mark.parametrize("length", [16, 48, 8192])
def test_14_the_sequence_length_is_the_configured_one(corpora, open_loader, length: int) -> None:
    """Sequences had 4,096 tokens, whatever the flag said."""
    assert open_loader(
        corpora.data(), batch=BatchConfig(S, 1, length)
    ).next_batch().tokens.shape == (
        S,
        length,
    )


def test_15_every_evaluation_reads_the_same_text(corpora, open_loader) -> None:
    """The validation cursor went on, so each evaluation was of other data."""
    loader = open_loader(corpora.data(heldout_documents=8))
    before = loader.build_heldout_sequences(3)
    state = loader.state_dict()
    streams(loader, 5)
    after = loader.build_heldout_sequences(3)
    for name, held in before.items():
        np.testing.assert_array_equal(held.sequences.tokens, after[name].sequences.tokens)
    fresh = open_loader(corpora.data(heldout_documents=8))
    assert fresh.state_dict() == state


def test_16_folders_files_and_what_is_neither(corpora, open_loader) -> None:
    """A folder, though supported, crashed in the check that came before the test for folders."""
    data = corpora.data()
    folder = streams(open_loader(data), 3)
    data.sources["alpha"].paths = ["alpha/a.arrow", "alpha/b.arrow"]
    np.testing.assert_array_equal(streams(open_loader(data), 3), folder)
    data.sources["alpha"].paths = ["alpha/*.arrow"]
    np.testing.assert_array_equal(streams(open_loader(data), 3), folder)
    (corpora.root / "alpha/c.arrow").write_bytes(b"not Arrow at all")
    with pytest.raises(ConfigError, match=r"alpha/c\.arrow: not a whole Arrow or Parquet file"):
        open_loader(data)


def test_17_mixing_is_the_same_on_every_rank_and_survives_the_end_of_a_source(
    corpora, open_loader
) -> None:
    """Interleaving drew from an unseeded generator in each rank and stopped with the shortest."""
    data = corpora.data({"alpha": 0.1, "gamma": 0.9})
    whole = streams(open_loader(data), 60)
    ranks = [open_loader(data, dp_rank=r, dp_world_size=2) for r in range(2)]
    for rank, loader in enumerate(ranks):
        np.testing.assert_array_equal(streams(loader, 60), whole[rank::2])
    assert sum(loader.compute_ledger()["gamma"]["epochs"] for loader in ranks) > 2


def test_18_the_order_is_our_own_and_stays(one_source) -> None:
    """A library's default changed how rows are dealt to ranks, and with it the order of data."""
    loader = one_source([f"{i}" for i in range(20)])
    found = [texts_of(loader, row)[:6] for row in streams(loader, 1)]
    assert found == ORDER


ORDER = [
    ["19", "17", "15", "1", "14", "13"],
    ["8", "0", "4", "11", "17", "19"],
    ["6", "16", "13", "10", "5", "16"],
    ["5", "9", "2", "12", "6", "1"],
]


def test_19_epochs_are_counted(one_source) -> None:
    """The iterator never ended, so the epoch that was logged was always zero."""
    loader = one_source([f"document {i}" for i in range(13)], warn_epochs=2.5)
    epochs, news = [], []
    for _ in range(30):
        loader.next_batch()
        epochs.append(loader.compute_ledger()["alpha"]["epochs"])
        news += loader.epoch_warnings()
    assert epochs == sorted(epochs)
    assert epochs[-1] > 3
    assert len(news) == 1
    assert re.match(r"data\.sources\.alpha has been read [3-5]\.\d times, more than", news[0])


def test_20_the_borders_of_documents_are_kept_where_asked(one_source) -> None:
    """No border was kept: attention and loss crossed documents and could not be told not to."""
    texts = [f"document {i}" for i in range(13)]
    batch = one_source(texts, document_mask=True, loss_mask=True).next_batch()
    ends = batch.tokens == one_source(texts).eos_token_id
    assert batch.document_ids is not None
    np.testing.assert_array_equal(np.diff(batch.document_ids, axis=1), ends[:, :-1])
