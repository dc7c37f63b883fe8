"""Bits per byte against manual examples."""

import math

import numpy as np
import pytest
from omegaconf import OmegaConf

from hlat.data.heldout_sequences import HeldoutSequences
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.interface import StepMetrics
from hlat.evaluate.heldout_evaluation import EvaluationData, evaluate_heldout
from hlat.tracking.tracker import Tracker


class FakeEngine:
    """Engine with the first token id as the loss in nats."""

    def eval_step(self, sequences):
        return sequences.tokens

    def read(self, metrics):
        return StepMetrics(float(metrics[0, 0]))


def test_a_slow_evaluation_prints_its_progress(compose, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hlat.evaluate.heldout_evaluation._SLOW_EVALUATION_S", 0.0)
    text = HeldoutSequences(PackedSequences(np.full((2, 4), 2, np.int32)), tokens_per_byte=0.25)
    tracker = Tracker(tmp_path, OmegaConf.to_object(compose()))
    evaluate_heldout(FakeEngine(), EvaluationData({"a": text, "b": text}), tracker, 3)
    progress, result = capsys.readouterr().out.splitlines()
    assert progress.startswith("step 3: evaluated a, 1 of 2 sources in ")
    assert result.startswith("step 3: held-out bits per byte")


def test_bits_per_byte_is_bits_per_token_times_tokens_per_byte(compose, tmp_path):
    tracker = Tracker(tmp_path, OmegaConf.to_object(compose()))
    heldout = {
        "a": HeldoutSequences(PackedSequences(np.full((2, 4), 2, np.int32)), tokens_per_byte=0.25),
        "b": HeldoutSequences(PackedSequences(np.full((1, 4), 6, np.int32)), tokens_per_byte=0.5),
    }
    evaluate_heldout(FakeEngine(), EvaluationData(heldout), tracker, 7)
    row = OmegaConf.create((tmp_path / "events.jsonl").read_text())
    assert row.event == "evaluate"
    assert row.step == 7
    assert row.loss == {"a": 2.0, "b": 6.0, "mean": 4.0}
    assert row.bits_per_byte.a == pytest.approx(2 / math.log(2) * 0.25)
    assert row.bits_per_byte.b == pytest.approx(6 / math.log(2) * 0.5)
    assert row.bits_per_byte["mean"] == pytest.approx(1.75 / math.log(2))
