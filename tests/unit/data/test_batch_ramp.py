"""Batches within a ramp and a length warm-up: the sequences of full batches in their order."""

import itertools
import json
import random

import numpy as np
import pytest

from hlat.config.batch import BatchConfig, BatchRampConfig, LengthWarmupConfig
from hlat.config.batch_steps import get_batch_size
from hlat.config.config_errors import ConfigError
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data.data_loader import merge_state_dicts

SWITCH = PhaseConfig(
    "switch",
    [PhaseStage("first", 5 * 256), PhaseStage("second", None, {"beta": 1.0, "gamma": 1})],
)
RAMP = BatchConfig(8, 2, 32, ramp=BatchRampConfig(4, 2, 1500))
"""Sizes 4 and 6 before 8; batches of 6 straddle full batches."""
NUM_STEPS = 20


@pytest.fixture
def open_ranks(corpora, open_loader):
    def open_(num_ranks: int = 1, batch: BatchConfig = RAMP, **settings):
        data = corpora.data(**settings)
        return [
            open_loader(data, SWITCH, batch, dp_rank=r, dp_world_size=num_ranks)
            for r in range(num_ranks)
        ]

    return open_


def read_rows(ranks, steps) -> list[np.ndarray]:
    """Return the global batch of each step."""
    batches = []
    for step in steps:
        parts = [one.next_batch(step).tokens for one in ranks]
        batches.append(np.stack(parts, axis=1).reshape(-1, parts[0].shape[1]))
    return batches


@pytest.fixture
def expected(open_ranks) -> list[np.ndarray]:
    """Return the batches of each step, from full batches."""
    (full,) = open_ranks(batch=BatchConfig(8, 2, 32))
    rows = iter(np.concatenate([full.next_batch().tokens for _ in range(NUM_STEPS)]))
    sizes = [get_batch_size(step, RAMP) for step in range(NUM_STEPS)]
    assert {4, 6, 8} == {*sizes}
    return [np.array([*itertools.islice(rows, size)]) for size in sizes]


def assert_equal(batches, expected) -> None:
    for batch, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch, other)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("settings", [{"prefetch": 0}, {"prefetch": 3}, {"workers": 2}], ids=str)
def test_sequences_are_those_of_full_batches(open_ranks, expected, num_ranks, settings) -> None:
    ranks = open_ranks(num_ranks, **settings)
    assert_equal(read_rows(ranks, range(NUM_STEPS)), expected)


@pytest.mark.parametrize("seed", range(3))
def test_resume_within_the_ramp(open_ranks, expected, seed: int) -> None:
    rng, step, found, state = random.Random(seed), 0, [], None
    while step < NUM_STEPS:
        ranks = open_ranks(rng.choice([1, 2]), prefetch=rng.choice([0, 2]))
        for one in ranks:
            if state is not None:
                one.load_state_dict(json.loads(state))
        end = min(NUM_STEPS, step + rng.randint(0, 3))
        found += read_rows(ranks, range(step, end))
        merged = merge_state_dicts([one.state_dict() for one in ranks])
        state, step = json.dumps(merged), end
    assert_equal(found, expected)
    (whole,) = open_ranks()
    read_rows([whole], range(NUM_STEPS))
    assert json.loads(state) == json.loads(json.dumps(whole.state_dict()))
    assert [entry[0] for entry in merged["chapters"]] == ["first"]


def test_the_state_has_the_returned_sequences_of_the_next_full_batch(open_ranks) -> None:
    (one,) = open_ranks()
    states = [one.next_batch(step) and one.state_dict() for step in range(6)]
    returned = [8 * state["step"] + state.get("returned_sequences", 0) for state in states]
    sizes = [get_batch_size(step, RAMP) for step in range(6)]
    assert returned == [*itertools.accumulate(sizes)]


def test_skipped_batches_are_full_batches(open_ranks, expected) -> None:
    """A rollback to the middle of a full batch also skips the rest of this batch."""
    rows = np.concatenate(expected)
    (one,) = open_ranks(prefetch=2)
    read_rows([one], range(3))
    state = one.state_dict()
    assert (state["step"], state["returned_sequences"]) == (1, 4)
    read_rows([one], range(3, 5))
    assert one.last_batches(8) == range(1, 3)
    assert one.last_batches(4) == range(2, 3)
    one.load_state_dict(state)
    one.skip_batches([range(1, 3)])
    resumed = np.concatenate(read_rows([one], range(3, 8)))
    np.testing.assert_array_equal(resumed, rows[24 : 24 + len(resumed)])


def test_a_failed_read_repeats_all_rows_of_a_batch(open_ranks, expected, monkeypatch) -> None:
    (one,) = open_ranks()
    found, failures = [], 0
    receive = type(one)._receive_batch
    calls = itertools.count()

    def fail_every_second_time(loader):
        if next(calls) % 2:
            raise ConfigError("unreadable")
        return receive(loader)

    monkeypatch.setattr(type(one), "_receive_batch", fail_every_second_time)
    while len(found) < NUM_STEPS:
        try:
            found += read_rows([one], [len(found)])
        except ConfigError:
            failures += 1
            if failures % 3 == 0:
                monkeypatch.setattr(type(one), "_receive_batch", receive)
                found += read_rows([one], [len(found)])
                monkeypatch.setattr(type(one), "_receive_batch", fail_every_second_time)
    assert failures > 5
    assert_equal(found, expected)


def test_a_shorter_length_divides_each_sequence(open_ranks) -> None:
    warmup = BatchConfig(8, 2, 32, length_warmup=LengthWarmupConfig(8, 4 * 256))
    (full,), ranks = open_ranks(batch=BatchConfig(8, 2, 32)), open_ranks(2, batch=warmup)
    lengths = []
    for step in range(6):
        parts = [one.next_batch(step).tokens for one in ranks]
        lengths.append(parts[0].shape[1])
        rows = np.stack([part.reshape(-1, 32) for part in parts], axis=1).reshape(-1, 32)
        np.testing.assert_array_equal(rows, full.next_batch().tokens)
    assert lengths == [8, 8, 16, 16, 32, 32]


def test_document_ids_start_at_each_shorter_sequence(corpora, open_loader) -> None:
    data = corpora.data(document_mask=True)
    loader = open_loader(
        data, batch=BatchConfig(4, 1, 32, length_warmup=LengthWarmupConfig(16, 1024))
    )
    sequences = loader.next_batch(0)
    assert sequences.tokens.shape == sequences.document_ids.shape == (8, 16)
    assert not sequences.document_ids[:, 0].any()
