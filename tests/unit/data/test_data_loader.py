"""Test that global batches are independent of ranks, prefetch and resumes."""

import itertools
import json
import os
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import data_loader as loader_module
from hlat.data.data_loader import merge_state_dicts
from hlat.data.packed_sequences import compute_document_ids
from hlat.data.tokenizer import Tokenizer

WEIGHTS = {"alpha": 0.5, "beta": 0.3, "gamma": 0.2}
SWITCH = PhaseConfig(
    "switch",
    [PhaseStage("first", 20 * 128), PhaseStage("second", None, {"beta": 1.0, "gamma": 1})],
)


def read_batches(loaders, steps):
    """Read batches from the loaders of all ranks and interleave their rows."""
    batches = []
    for _ in range(steps):
        parts = [one.next_batch().tokens for one in loaders]
        batch = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.int32)
        for rank, part in enumerate(parts):
            batch[rank :: len(parts)] = part
        batches.append(batch)
    return batches


@pytest.fixture
def open_ranks(corpora, open_loader):
    def open_(num_ranks: int = 1, prefetch: int = 0, phase: PhaseConfig = SWITCH):
        data = corpora.data(prefetch=prefetch)
        return [
            open_loader(data, phase, dp_rank=r, dp_world_size=num_ranks) for r in range(num_ranks)
        ]

    return open_


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_global_batches_do_not_depend_on_ranks_or_prefetch(open_ranks, num_ranks, prefetch) -> None:
    expected = read_batches(open_ranks(), 50)
    ranks = open_ranks(num_ranks, prefetch)
    np.testing.assert_array_equal(read_batches(ranks, 50), expected)
    (whole,) = open_ranks()
    read_batches([whole], 50)
    assert merge_state_dicts([one.state_dict() for one in ranks]) == whole.state_dict()


def test_shape_and_dtype_of_a_batch(open_ranks) -> None:
    ranks = open_ranks(2)
    batch = ranks[1].next_batch().tokens
    assert batch.shape == (2, 32)
    assert batch.dtype == np.int32
    assert batch.min() >= 0
    assert batch.max() < ranks[1].vocab_size


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))]
)
def test_random_resumes_equal_the_uninterrupted_run(open_ranks, seed: int) -> None:
    """Resume repeatedly with other ranks and prefetch, also across stages."""
    expected = read_batches(open_ranks(), 60)
    rng = random.Random(seed)
    step, found, state = 0, [], None
    while step < 60:
        ranks = open_ranks(rng.choice([1, 2, 4]), rng.choice([0, 1, 3]))
        for one in ranks:
            if state is not None:
                one.load_state_dict(json.loads(state))
        steps = min(rng.randint(0, 15), 60 - step)
        found += read_batches(ranks, steps)
        state = json.dumps(merge_state_dicts([one.state_dict() for one in ranks]))
        step += steps
    np.testing.assert_array_equal(found, expected)


def test_state_excludes_prefetched_batches(open_ranks) -> None:
    (eager,), (lazy,) = open_ranks(prefetch=8), open_ranks()
    for _ in range(5):
        eager.next_batch()
        lazy.next_batch()
        assert eager.state_dict() == lazy.state_dict()
        assert eager.compute_ledger() == lazy.compute_ledger()
    assert eager.state_dict()["step"] == 5


def test_restore_an_earlier_state(open_ranks) -> None:
    (one,) = open_ranks(prefetch=2)
    start = one.state_dict()
    first = read_batches([one], 30)
    one.load_state_dict(start)
    np.testing.assert_array_equal(read_batches([one], 30), first)


def test_the_state_contains_skipped_batches(open_ranks) -> None:
    (whole,), (first,) = open_ranks(), open_ranks(prefetch=2)
    batches = read_batches([whole], 12)
    earlier = first.state_dict()
    first.skip_batches([range(2, 5), range(8, 9), range(2, 5)])
    assert first.num_skipped_batches == 4
    np.testing.assert_array_equal(read_batches([first], 3), [batches[i] for i in (0, 1, 5)])
    state = json.loads(json.dumps(first.state_dict()))
    assert state["skipped"] == [[2, 5], [8, 9]]
    for ranks in (open_ranks(2), [first]):
        for one in ranks:
            one.load_state_dict(state)
            one.skip_batches([range(8, 9), range(10, 11)])
        np.testing.assert_array_equal(read_batches(ranks, 4), [batches[i] for i in (6, 7, 9, 11)])
        assert ranks[0].last_batches(3 * 4) == range(7, 12)
    first.load_state_dict(earlier)
    np.testing.assert_array_equal(read_batches([first], 3), batches[:3])
    del state["skipped"]  # as in checkpoints of earlier versions
    first.load_state_dict(state)
    np.testing.assert_array_equal(read_batches([first], 6), batches[6:])


@pytest.mark.parametrize("bounds", [[3, 2], [-1, 2], [0, 2**70], [1], ["1", 2], [1.5, 3], 4, None])
def test_a_state_with_malformed_skipped_batches_is_rejected(open_ranks, bounds) -> None:
    (one,) = open_ranks()
    with pytest.raises(ConfigError, match="the checkpoint's data state was not written by hlat"):
        one.load_state_dict({**one.state_dict(), "skipped": [bounds]})


def test_stage_name_is_that_of_the_last_batch(open_ranks) -> None:
    (one,), (other,) = open_ranks(prefetch=3), open_ranks(2)[:1]
    stages = []
    for _ in range(22):
        one.next_batch()
        stages.append(one.stage_name)
    assert stages == ["first"] * 20 + ["second"] * 2
    assert sum(one.next_proportions.values()) == pytest.approx(1)
    assert other.stage_name == "first"
    other.load_state_dict(one.state_dict())
    assert other.stage_name == "second"


def test_changed_mixture_applies_from_the_resume(open_ranks) -> None:
    before = PhaseConfig("before", [PhaseStage("main")])
    after = PhaseConfig(
        "after", [PhaseStage("main", 30 * 128), PhaseStage("late", None, {"gamma": 1.0})]
    )
    (one,), (other,) = open_ranks(phase=before), open_ranks(phase=after)
    read_batches([one], 30)
    other.load_state_dict(one.state_dict())
    read = other.compute_ledger()
    read_batches([other], 10)
    gained = {
        name: entry["tokens"] - read[name]["tokens"]
        for name, entry in other.compute_ledger().items()
    }
    assert gained == {"alpha": 0, "beta": 0, "gamma": 10 * 128}


def test_ledger_sums_to_the_tokens_read(corpora, open_loader) -> None:
    corpora.write("gamma", ["", *corpora.documents["gamma"]])
    one = open_loader(corpora.data(prefetch=2))
    assert one.compute_ledger()["alpha"] == {"tokens": 0, "documents": 0, "epochs": 0.0}
    read_batches([one], 100)
    ledger = one.compute_ledger()
    assert sum(entry["tokens"] for entry in ledger.values()) == 100 * 4 * 32
    for name, share in WEIGHTS.items():
        assert abs(ledger[name]["tokens"] - share * 12_800) <= 4 * 4 * 32
        rows = len(corpora.documents[name]) - 3
        assert ledger[name]["epochs"] == ledger[name]["documents"] / rows


def test_state_is_small_and_json_serializable(open_ranks) -> None:
    (one,) = open_ranks()
    read_batches([one], 60)
    text = json.dumps(one.state_dict())
    assert json.loads(text) == one.state_dict()
    assert len(json.dumps(one.state_dict()["streams"])) < 4 * 100


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"heldout_documents": 4}, "data.heldout_documents"),
        ({"weights": {"alpha": 1.0, "beta": 1.0}}, "data.sources.gamma"),
    ],
)
def test_other_data_is_rejected(corpora, open_loader, change, key: str) -> None:
    one, other = open_loader(corpora.data()), open_loader(corpora.data(**change))
    with pytest.raises(ConfigError) as error:
        other.load_state_dict(one.state_dict())
    assert error.value.problems[-1].startswith(f"{key}: the checkpoint was written with ")
    assert len(error.value.problems) == 1


def test_other_sizes_seeds_and_documents_are_rejected_with_both_values(
    corpora, open_loader
) -> None:
    one = open_loader(corpora.data())
    corpora.write("beta", corpora.documents["beta"][:-1])
    other = open_loader(corpora.data(), batch=BatchConfig(4, 1, 16), seed=2)
    with pytest.raises(ConfigError) as error:
        other.load_state_dict(one.state_dict())
    lengths, documents, seeds = error.value.problems
    assert lengths == (
        "batch.sequence_length: the checkpoint was written with 32, this run has 16; "
        "restore the former, or start a new run"
    )
    assert documents.startswith("data.sources.beta: the checkpoint was written with {'files': 2, ")
    assert "'rows': 23" in documents
    assert "'rows': 22" in documents
    assert seeds.startswith("run.seed: the checkpoint was written with 1, this run has 2")


def test_states_of_other_ranks_or_versions_are_rejected(open_ranks) -> None:
    first, second = open_ranks(2)
    with pytest.raises(ConfigError, match="lacks streams 1, 3 of this rank; merge the states"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="has version 99, not 2"):
        first.load_state_dict({**first.state_dict(), "version": 99})


def test_weights_may_change_at_a_resume(corpora, open_loader) -> None:
    one = open_loader(corpora.data())
    other = open_loader(corpora.data({"alpha": 1.0, "beta": 1.0, "gamma": 0.0}))
    one.next_batch()
    other.load_state_dict(one.state_dict())
    other.next_batch()
    assert other.compute_ledger()["gamma"] == one.compute_ledger()["gamma"]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_error_in_the_background_is_raised_and_the_batch_can_be_read_again(
    open_ranks, monkeypatch, prefetch: int
) -> None:
    expected = read_batches(open_ranks(), 40)
    (one,) = open_ranks(prefetch=prefetch)
    found = read_batches([one], 5)
    with monkeypatch.context() as patch:
        patch.setattr(one._training_data.tokenizer, "encode_chunks", lambda chunks: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            found.extend(one.next_batch().tokens for _ in expected)
    np.testing.assert_array_equal(found, expected[: len(found)])
    rest = read_batches([one], 40 - len(found))
    np.testing.assert_array_equal(rest, expected[len(found) :])


def test_close_stops_the_thread(corpora) -> None:
    def count_threads() -> int:
        return sum(t.name.startswith("hlat-data") for t in threading.enumerate())

    phase, batch = PhaseConfig("p", [PhaseStage("main")]), BatchConfig(4, 1, 32)
    before = count_threads()
    one = loader_module.build_data_loader(corpora.data(prefetch=4), phase, batch, 1)
    one.next_batch()
    assert count_threads() == before + 1
    one.close()
    assert count_threads() == before


def test_wait_time_is_measured(open_ranks) -> None:
    (one,) = open_ranks(prefetch=1)
    assert one.wait_seconds == 0.0
    one.next_batch()
    assert 0 < one.wait_seconds < 60


def test_heldout_sequences_are_independent_of_rank_and_seed(corpora, open_loader) -> None:
    data = corpora.data(heldout_documents=8)
    one, other = open_loader(data), open_loader(data, seed=2, dp_rank=1, dp_world_size=2)
    expected = one.build_heldout_sequences(4)
    for name, found in other.build_heldout_sequences(4).items():
        np.testing.assert_array_equal(found.sequences.tokens, expected[name].sequences.tokens)
    assert set(expected) == set(WEIGHTS)


@pytest.mark.parametrize("option", ["document_mask", "loss_mask"])
def test_document_ids_are_computed_if_an_option_requires_them(
    corpora, open_loader, option: str
) -> None:
    plain, masked = open_loader(corpora.data()), open_loader(corpora.data(**{option: True}))
    assert plain.next_batch().document_ids is None
    masked.load_state_dict(plain.state_dict())
    expected, found = plain.next_batch(), masked.next_batch()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(
        found.document_ids, compute_document_ids(found.tokens, masked.eos_token_id)
    )
    assert all(
        held.sequences.document_ids is not None
        for held in masked.build_heldout_sequences(1).values()
    )


@pytest.fixture
def with_bos(corpora, bos, bos_tokenizer_file):
    """Return a function that builds settings of the small corpora with BOS."""

    def build(weights=None, **changes):
        tokenizer = {"tokenizer": str(bos_tokenizer_file), "bos_token": bos}
        return corpora.data(weights, **tokenizer | changes)

    return build


def test_batch_with_bos_equals_a_manually_built_one(corpora, open_loader, with_bos, eos) -> None:
    corpora.write("alpha", [f"text {i}" for i in range(40)])
    data = with_bos({"alpha": 1.0}, document_mask=True, loss_mask=True)
    loader = open_loader(data, batch=BatchConfig(2, 1, 9))
    first, second = loader.next_batch(), loader.next_batch()
    source = loader._training_data.sources["alpha"]
    plain = Tokenizer("embedded", ".", eos)
    for row in range(2):
        tokens, ids = [], []
        for document in range(18):
            text = str(source.read_training_document(2 * document + row), "utf-8")
            (text_ids,) = plain.encode_chunks([text])
            whole = [4096, *text_ids.tolist(), plain.eos_token_id]
            tokens += whole
            ids += [document] * len(whole)
        assert first.tokens[row].tolist() == tokens[:9]
        assert second.tokens[row].tolist() == tokens[9:18]
        assert first.document_ids[row].tolist() == ids[:9]
        assert second.document_ids[row].tolist() == [i - ids[9] for i in ids[9:18]]
        assert first.tokens[row, 0] == 4096


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow_after(2)
def test_global_batches_with_bos_do_not_depend_on_ranks_or_workers(
    open_loader, with_bos, num_ranks: int, workers: int
) -> None:
    (whole,) = [open_loader(with_bos(), SWITCH)]
    expected = read_batches([whole], 30)
    data = with_bos(workers=workers, prefetch=2)
    ranks = [
        open_loader(data, SWITCH, dp_rank=r, dp_world_size=num_ranks) for r in range(num_ranks)
    ]
    np.testing.assert_array_equal(read_batches(ranks, 30), expected)
    assert merge_state_dicts([one.state_dict() for one in ranks]) == whole.state_dict()


@pytest.mark.slow  # starts processes
def test_a_run_with_bos_resumes_with_other_ranks_and_workers(open_loader, with_bos) -> None:
    expected = read_batches([open_loader(with_bos(), SWITCH)], 40)
    found, state = [], None
    for num_ranks, workers, prefetch in ((2, 1, 3), (1, 0, 0), (4, 2, 1), (1, 3, 2)):
        data = with_bos(workers=workers, prefetch=prefetch)
        ranks = [
            open_loader(data, SWITCH, dp_rank=r, dp_world_size=num_ranks) for r in range(num_ranks)
        ]
        for one in ranks:
            if state is not None:
                one.load_state_dict(json.loads(state))
        found += read_batches(ranks, 10)
        state = json.dumps(merge_state_dicts([one.state_dict() for one in ranks]))
    np.testing.assert_array_equal(found, expected)


def test_bos_is_counted_for_its_source_and_not_as_a_document(open_loader, with_bos) -> None:
    loader = open_loader(with_bos())
    tokens = np.concatenate([one.ravel() for one in read_batches([loader], 100)])
    ledger = loader.compute_ledger()
    assert sum(entry["tokens"] for entry in ledger.values()) == tokens.size
    for name, share in WEIGHTS.items():
        assert abs(ledger[name]["tokens"] - share * tokens.size) <= 4 * 4 * 32
    num_ended = int((tokens == loader.eos_token_id).sum())
    assert sum(entry["documents"] for entry in ledger.values()) == num_ended
    assert 0 <= int((tokens == loader.bos_token_id).sum()) - num_ended <= 3 * 4  # open documents


def test_the_fingerprint_has_bos_only_if_it_is_set(corpora, open_loader, with_bos, bos) -> None:
    assert "data.bos_token" not in open_loader(corpora.data()).fingerprint
    assert open_loader(with_bos()).fingerprint["data.bos_token"] == bos


def test_other_bos_is_rejected_with_both_values(
    corpora, open_loader, bos_tokenizer_file, bos, eos
) -> None:
    def open_(bos_token):
        data = corpora.data(tokenizer=str(bos_tokenizer_file), bos_token=bos_token)
        return open_loader(data)

    for before, after in itertools.permutations((None, bos, eos), 2):
        with pytest.raises(ConfigError) as error:
            open_(after).load_state_dict(open_(before).state_dict())
        assert error.value.problems == (
            f"data.bos_token: the checkpoint was written with {before or 'none'}, this run has "
            f"{after or 'none'}; restore the former, start a new run, or accept it with "
            "'data.allow_changed=[data.bos_token]'",
        )


def test_an_accepted_bos_starts_with_the_next_document(corpora, open_loader, with_bos) -> None:
    corpora.write("alpha", [f"old{i} " * 40 for i in range(30)])
    before = open_loader(with_bos({"alpha": 1.0}, bos_token=None))
    read_batches([before], 4)
    after = open_loader(with_bos({"alpha": 1.0}, allow_changed=["data.bos_token"]))
    assert len(after.load_state_dict(before.state_dict())) == 1
    assert after.next_batch().tokens[:, 0].tolist() == [4096] * 4


def test_each_data_parallel_rank_validates_other_files(corpora, open_loader) -> None:
    ranks = [open_loader(corpora.data(), dp_rank=r, dp_world_size=2) for r in range(2)]
    follower = open_loader(
        corpora.data(), model_parallel_group=SimpleNamespace(is_rank0=False, broadcast=None)
    )
    for loader in (*ranks, follower):
        loader.validate_files()
    os.truncate(corpora.root / "beta/b.arrow", 9)
    ranks[0].validate_files()
    follower.validate_files()
    with pytest.raises(ConfigError, match=r"beta/b\.arrow has changed since the run opened it"):
        ranks[1].validate_files()
