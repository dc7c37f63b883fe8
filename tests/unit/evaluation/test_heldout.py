"""Bits per byte from nats per token, by hand."""

import math

import numpy as np
import pytest
from omegaconf import OmegaConf

from hlat.data.heldout import HeldOut
from hlat.data.sequences import Sequences
from hlat.engine.interface import Numbers
from hlat.evaluation.heldout import Material, evaluate
from hlat.tracking.tracker import Tracker


class CountingEngine:
    """Says that a source's loss in nats is its first token's id."""

    def eval_step(self, sequences):
        return sequences.tokens

    def read(self, pending):
        return Numbers(float(pending[0, 0]))


def test_bits_per_byte_is_bits_per_token_times_tokens_per_byte(compose, tmp_path):
    tracker = Tracker(tmp_path, OmegaConf.to_object(compose()))
    heldout = {
        "a": HeldOut(Sequences(np.full((2, 4), 2, np.int32)), tokens_per_byte=0.25),
        "b": HeldOut(Sequences(np.full((1, 4), 6, np.int32)), tokens_per_byte=0.5),
    }
    evaluate(CountingEngine(), Material(heldout), tracker, 7)
    row = OmegaConf.create((tmp_path / "events.jsonl").read_text())
    assert row.event == "evaluate"
    assert row.step == 7
    assert row.loss == {"a": 2.0, "b": 6.0, "mean": 4.0}
    assert row.bits_per_byte.a == pytest.approx(2 / math.log(2) * 0.25)
    assert row.bits_per_byte.b == pytest.approx(6 / math.log(2) * 0.5)
    assert row.bits_per_byte["mean"] == pytest.approx(1.75 / math.log(2))
