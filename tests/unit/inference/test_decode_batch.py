"""Sequences that join and leave a batch: their tokens and scores are those without the others."""

from collections.abc import Iterator

import numpy as np
import pytest

from hlat.config.resolve import resolve_config
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.inference import decode_batch
from hlat.inference.decode_batch import DecodeBatch, DecodeSequence, ScoredToken
from hlat.inference.inference_model import InferenceModel

VOCAB_SIZE = 131


@pytest.fixture(scope="module")
def engine(compose) -> Iterator[Engine]:
    """Return a model with large initial values, so that its predictions are distinct."""
    sizes = ["hidden_size=96", "num_attention_heads=6", "num_key_value_heads=2", "num_layers=2"]
    config = resolve_config(
        compose(
            *(f"model.{size}" for size in sizes),
            f"model.vocab_size={VOCAB_SIZE}",
            "model.init_std=0.1",
            "batch.sequence_length=32",
        )
    )
    engine = create_engine(config)
    engine.build(config, training=False)
    yield engine
    engine.close()


def build_sequences(**settings) -> list[DecodeSequence]:
    """Return sequences of several lengths with different settings."""
    generator = np.random.default_rng(0)
    lengths = [(5, 9), (1, 20), (30, 4), (5, 1), (12, 12), (2, 30), (7, 7), (1, 2)]
    return [
        DecodeSequence(
            generator.integers(0, VOCAB_SIZE, length).tolist(),
            max_tokens,
            temperature=(0.0, 0.8, 1.5)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            **settings,
        )
        for i, (length, max_tokens) in enumerate(lengths)
    ]


def decode(
    engine: Engine, sequences: list[DecodeSequence]
) -> dict[DecodeSequence, list[ScoredToken]]:
    """Decode sequences, of which one joins at each step as long as there is room."""
    batch, waiting = DecodeBatch(engine), sequences[::-1]
    tokens: dict[DecodeSequence, list[ScoredToken]] = {}
    while waiting or batch.sequences:
        if waiting and batch.has_room(waiting[-1]):
            sequence = waiting.pop()
            prompt_scores, first = batch.add(sequence)
            tokens[sequence] = [*prompt_scores, *([] if first is None else [first])]
        for sequence, token in batch.step():
            tokens[sequence].append(token)
    return tokens


@pytest.mark.parametrize(("max_sequences", "max_cached_tokens"), [(16, 1000), (3, 1000), (16, 70)])
def test_tokens_equal_those_of_one_sequence_at_a_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, max_sequences: int, max_cached_tokens: int
) -> None:
    monkeypatch.setattr(decode_batch, "MAX_SEQUENCES", max_sequences)
    monkeypatch.setattr(decode_batch, "MAX_CACHED_TOKENS", max_cached_tokens)
    monkeypatch.setattr(decode_batch, "_CAPACITY_STEP", 5)
    sequences = build_sequences()
    tokens = decode(engine, sequences)
    for sequence in sequences:
        [expected] = InferenceModel(engine).generate(
            [sequence.prompt],
            sequence.max_tokens,
            is_finished=lambda _: False,
            temperature=sequence.temperature,
            top_p=sequence.top_p,
            seed=sequence.seed,
            sample_ids=[0],
        )
        assert sequence.tokens == [one.token for one in tokens[sequence]] == expected


def test_scores_equal_those_of_the_evaluation(engine: Engine) -> None:
    sequences = build_sequences(score_prompt=True)
    for i, sequence in enumerate(sequences):
        sequence.num_top = i % 4
    sequences += [DecodeSequence([3, 4, 5], 0, num_top=0, score_prompt=True)]
    tokens = decode(engine, sequences)
    for sequence in sequences:
        ids = [*sequence.prompt, *sequence.tokens]
        first, *others = tokens[sequence]
        assert [one.token for one in tokens[sequence]] == ids
        assert first == ScoredToken(ids[0])
        expected = InferenceModel(engine).score(
            [([*ids[:i]], [ids[i]]) for i in range(1, len(ids))]
        )
        for one, (log_prob, is_greedy) in zip(others, expected, strict=True):
            assert one.log_prob == pytest.approx(log_prob, abs=1e-5)
            assert len(one.top_log_probs) == sequence.num_top
            if sequence.num_top:
                assert is_greedy == (one.log_prob == max(one.top_log_probs.values()))


def test_removed_sequences_leave_the_others_unchanged(engine: Engine) -> None:
    expected = decode(engine, build_sequences())
    batch, sequences = DecodeBatch(engine), build_sequences()
    for sequence in sequences:
        batch.add(sequence)
    batch.remove(sequences[0])  # before its first step
    for _ in range(3):
        batch.step()
    batch.remove(sequences[5])
    while batch.step():
        pass
    assert [len(sequences[i].tokens) for i in (0, 5)] == [1, 4]
    for sequence, one in zip(expected, sequences, strict=True):
        assert sequence.tokens[: len(one.tokens)] == one.tokens
