"""A stream is what a few lines of brute force say it is, wherever it is cut."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from hlat.config.batch import Batch
from hlat.config.phase import Phase, Stage
from hlat.data.mixture import make_timeline
from hlat.data.source import open_sources
from hlat.data.streams import Stream, next_sequences
from hlat.data.tokenizer import Tokenizer

S, LENGTH = 4, 32
WEIGHTS = {"alpha": 0.5, "beta": 0.3, "gamma": 0.2}


class Setting:
    """The parts of a loader, without one."""

    def __init__(self, corpora, eos, weights=None, stages=None):
        data = corpora.data(weights)
        self.sources = open_sources(data, 1)
        self.tokenizer = Tokenizer("embedded", ".", eos)
        phase = Phase("p", stages or [Stage("main")])
        self.timeline = make_timeline(phase, data, Batch(S, 1, LENGTH))
        self.streams = [Stream(i, S, list(self.sources), LENGTH) for i in range(S)]

    def run(self, steps, start=0):
        """Token ids [S, steps * LENGTH]."""
        batches = [
            next_sequences(
                self.streams, self.timeline.at(step), self.sources, self.tokenizer, LENGTH
            )
            for step in range(start, start + steps)
        ]
        return np.concatenate(batches, axis=1)

    def document(self, name, position):
        (ids,) = self.tokenizer.encode([self.sources[name].training_text(position)])
        return ids.tolist()

    def documents(self, name, number, count):
        """Tokens of a stream's first documents of a source, one after the other."""
        found = (self.document(name, j * S + number) for j in range(count))
        return list(chain.from_iterable(found))


def brute_force(setting, number, num_tokens, shares):
    """One stream of one stage, by lists and a loop: the definition."""
    left = {name: [] for name in shares}
    ordinal, read, out = dict.fromkeys(shares, 0), dict.fromkeys(shares, 0), []
    source = setting.timeline.at(0).first_source((number + 0.5) / S)
    while len(out) < num_tokens:
        while not left[source]:
            left[source] = setting.document(source, ordinal[source] * S + number)
            ordinal[source] += 1
        segment, left[source] = left[source][: 4 * LENGTH], left[source][4 * LENGTH :]
        out += segment
        read[source] += len(segment)
        source = max(sorted(shares), key=lambda s: shares[s] * sum(read.values()) - read[s])
    return out[:num_tokens]


def test_every_stream_equals_brute_force(corpora, eos) -> None:
    corpora.write("beta", [*corpora.texts["beta"], "giant " * 5000, "", None])
    setting = Setting(corpora, eos)
    rows = setting.run(400)
    shares = dict(setting.timeline.at(0).shares)
    for number in range(S):
        assert rows[number].tolist() == brute_force(setting, number, 400 * LENGTH, shares)


def test_a_stream_of_one_source_is_its_documents_one_after_the_other(corpora, eos) -> None:
    setting = Setting(corpora, eos, {"alpha": 1.0})
    rows = setting.run(100)
    for number in range(S):
        assert rows[number].tolist() == setting.documents("alpha", number, 400)[: 100 * LENGTH]


def test_every_document_comes_once_an_epoch(corpora, eos) -> None:
    """Cut each stream at its eos tokens and count the documents of the first epochs."""
    corpora.write("alpha", [f"document {i}" for i in range(40)])
    setting = Setting(corpora, eos, {"alpha": 1.0})
    n = setting.sources["alpha"].num_training
    rows = setting.run(60)
    found = {}
    for number, row in enumerate(rows.tolist()):
        texts = setting.tokenizer.decode(row).split(eos)[:-1]
        found.update({j * S + number: text for j, text in enumerate(texts)})
    whole_epochs = min(p for p in range(len(found) + S) if p not in found) // n
    assert whole_epochs >= 3
    for epoch in range(whole_epochs):
        counts = Counter(found[epoch * n + i] for i in range(n))
        assert len(counts) == n
        assert set(counts.values()) == {1}


def test_shares_hold_within_the_bound_even_with_a_giant(corpora, eos) -> None:
    corpora.write("beta", ["giant " * 20_000, *corpora.texts["beta"]] * 2)
    setting = Setting(corpora, eos)
    for start in range(0, 600, 50):
        setting.run(50, start)
        for stream in setting.streams:
            read = {name: cursor.tokens for name, cursor in stream.cursors.items()}
            assert sum(read.values()) == (start + 50) * LENGTH
            for name, share in WEIGHTS.items():
                bound = 4 * LENGTH * (len(WEIGHTS) - 1) + 4 * LENGTH
                assert abs(read[name] - share * (start + 50) * LENGTH) <= bound


def test_a_switch_takes_effect_with_its_first_sequence_and_loses_nothing(corpora, eos) -> None:
    stages = [
        Stage("one", 20 * S * LENGTH, {"alpha": 1.0}),
        Stage("two", 30 * S * LENGTH, {"beta": 1.0}),
        Stage("three", None, {"alpha": 1.0}),
    ]
    setting = Setting(corpora, eos, stages=stages)
    rows = setting.run(90)
    for number in range(S):
        alpha = setting.documents("alpha", number, 200)
        beta = setting.documents("beta", number, 100)
        expected = alpha[: 20 * LENGTH] + beta[: 30 * LENGTH] + alpha[20 * LENGTH : 60 * LENGTH]
        assert rows[number].tolist() == expected


def test_shares_count_from_the_switch(corpora, eos) -> None:
    stages = [Stage("one", 300 * S * LENGTH, {"alpha": 1.0}), Stage("two", None, WEIGHTS)]
    setting = Setting(corpora, eos, stages=stages)
    setting.run(300)
    setting.run(300, 300)
    for stream in setting.streams:
        for name, share in WEIGHTS.items():
            assert abs(stream.cursors[name].stage_tokens - share * 300 * LENGTH) <= 12 * LENGTH


def test_empty_documents_give_no_tokens_but_are_counted(corpora, eos) -> None:
    corpora.write("alpha", ["full", "", None, ""] * 10)
    setting = Setting(corpora, eos, {"alpha": 1.0})
    rows = setting.run(4)
    assert (rows[:, :-1] == setting.tokenizer.eos).sum() > 0
    joined = setting.tokenizer.decode(rows[0].tolist())
    assert joined.startswith(f"full{eos}full{eos}full{eos}")
    assert f"{eos}{eos}" not in joined
    documents = sum(stream.cursors["alpha"].document for stream in setting.streams)
    full = sum(stream.cursors["alpha"].tokens for stream in setting.streams) / 2
    assert documents > 2 * full


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_a_restored_stream_goes_on_alike(corpora, eos, steps: int) -> None:
    corpora.write("beta", ["giant " * 900] * 10)
    setting, other = Setting(corpora, eos), Setting(corpora, eos)
    setting.run(steps)
    for stream, fresh in zip(setting.streams, other.streams, strict=True):
        fresh.restore(stream.state(), setting.timeline.at(0))
    assert [stream.state() for stream in other.streams] == [s.state() for s in setting.streams]
    np.testing.assert_array_equal(setting.run(30, steps), other.run(30, steps))
