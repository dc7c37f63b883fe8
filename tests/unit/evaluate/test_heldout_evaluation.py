"""Held-out loss, bits per byte and standard errors against manual examples."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from hlat.data.heldout_sequences import HeldoutSequences
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.interface import StepMetrics
from hlat.evaluate import heldout_evaluation, heldout_loss
from hlat.evaluate.heldout_evaluation import EvaluationData, evaluate_heldout, load_evaluation_data
from hlat.evaluate.heldout_loss import compute_heldout_loss, compute_ratio_stderr, summarize
from hlat.tracking.metric_logger import extract_event_scalars
from hlat.tracking.summary_metrics import compute_summary_metrics
from hlat.tracking.tracker import Tracker


class FakeEngine:
    """Engine with token ids as losses in nats, half of them with averaged weights."""

    def __init__(self, has_token_losses: bool = True, scale: float = 1.0) -> None:
        self.has_token_losses, self.scale = has_token_losses, scale

    @contextmanager
    def averaged_weights(self):
        self.scale /= 2
        yield
        self.scale *= 2

    def eval_step(self, sequences):
        return self.scale * sequences.tokens[:, 1:].astype(np.float32)

    def read_metrics(self, metrics):
        token_losses = metrics if self.has_token_losses else None
        return StepMetrics(float(metrics.mean()), token_losses=token_losses)


def text(tokens, documents, num_bytes=4) -> HeldoutSequences:
    """Return sequences in which every token but the first of a row is a target."""
    array = np.array(tokens, np.int32)
    is_target = np.broadcast_to(np.arange(array.shape[1]) > 0, array.shape)
    documents = np.array(documents, np.int32)
    hashes = np.arange(documents.max() + 1).astype(np.uint64)
    bytes_of = np.full_like(array, num_bytes)
    return HeldoutSequences(PackedSequences(array), documents, bytes_of, is_target, hashes)


A = text([[0, 2, 2, 4], [4, 2, 6, 2]], [[0, 0, 0, 1], [1, 1, 2, 2]])
B = text([[0, 6, 6, 6]], [[0, 0, 0, 0]], 2)


@pytest.fixture
def tracker(compose, tmp_path) -> Tracker:
    return Tracker(tmp_path, OmegaConf.to_object(compose()))


def events(tmp_path):
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


def test_loss_is_summed_by_document() -> None:
    found = compute_heldout_loss(FakeEngine(), A)
    assert found.nats.tolist() == [4, 6, 8]
    assert found.num_tokens.tolist() == [2, 2, 2]
    assert found.num_bytes.tolist() == [8, 8, 8]
    assert found.loss == 3
    assert found.bits_per_byte == pytest.approx(18 / math.log(2) / 24)
    # The means of equal documents, 2, 3 and 4 nats per token, have the standard error 1 / sqrt(3)
    assert found.stderr == pytest.approx(1 / math.sqrt(3) / math.log(2) / 4)


def test_long_text_is_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute_heldout_loss(FakeEngine(), A)
    monkeypatch.setattr(heldout_loss, "_MAX_TOKENS_PER_CALL", 4)
    parts = compute_heldout_loss(FakeEngine(), A)
    assert (parts.nats.tolist(), parts.digest) == (whole.nats.tolist(), whole.digest)


def test_engines_without_token_losses_have_no_standard_error() -> None:
    found = compute_heldout_loss(FakeEngine(has_token_losses=False), A)
    assert (found.loss, found.num_documents) == (3, 3)
    assert math.isnan(found.stderr)
    assert summarize({"a": found})["stderr"] == {}


def test_a_part_without_targets_adds_nothing(monkeypatch) -> None:
    engine = FakeEngine(has_token_losses=False)
    monkeypatch.setattr(engine, "read_metrics", lambda metrics: StepMetrics(math.nan))
    assert heldout_loss._sum_losses(engine, replace(A, is_target=A.is_target & False)) == [0]


def test_the_standard_error_is_that_of_a_bootstrap_over_documents() -> None:
    rng = np.random.default_rng(0)
    num_bytes = rng.integers(100, 2000, 60).astype(float)
    bits = num_bytes * (2 + 0.3 * rng.standard_normal(60)) - 0.1 * num_bytes
    draws = rng.integers(0, 60, (4000, 60))
    ratios = bits[draws].sum(1) / num_bytes[draws].sum(1)
    assert compute_ratio_stderr(bits, num_bytes) == pytest.approx(ratios.std(), rel=0.05)


def test_an_event_contains_values_by_source_and_their_mean(tracker, tmp_path) -> None:
    data = {"a": A, "b": B}
    evaluate_heldout(FakeEngine(), EvaluationData(data, data), tracker, 7)
    (row,) = events(tmp_path)
    assert (row["event"], row["step"]) == ("evaluate", 7)
    assert row["loss"] == {"a": 3, "b": 6, "mean": 4.5}
    bits = {"a": 18 / math.log(2) / 24, "b": 18 / math.log(2) / 6}
    assert row["bits_per_byte"] == pytest.approx(bits | {"mean": sum(bits.values()) / 2})
    assert row["stderr"].keys() == {"a"}  # one document has no standard error
    assert row["tokens"] == {"a": 6, "b": 3}
    assert row["bytes"] == {"a": 24, "b": 6}
    assert row["documents"] == {"a": 3, "b": 1}
    assert not row.keys() & {"loop", "clusters"}


def test_an_event_contains_the_moving_average(tracker, tmp_path, capsys) -> None:
    data = {"a": A, "b": B}
    evaluate_heldout(FakeEngine(), EvaluationData(data, data, has_ema=True), tracker, 7)
    (row,) = events(tmp_path)
    assert row["loss"] == {"a": 3, "b": 6, "mean": 4.5}
    assert row["ema"]["loss"] == {"a": 1.5, "b": 3, "mean": 2.25}
    bits = row["ema"]["bits_per_byte"]["mean"]
    assert f"; moving average of the weights {bits:.3f}" in capsys.readouterr().out
    scalars = extract_event_scalars(row)
    assert (scalars["eval/mean/loss"], scalars["eval_ema/mean/loss"]) == (4.5, 2.25)
    assert scalars["eval_ema/a/bits_per_byte"] == scalars["eval/a/bits_per_byte"] / 2
    summary = compute_summary_metrics([], [row])
    assert summary["heldout_ema_bits_per_byte"] == bits


def test_an_average_takes_the_place_of_the_weights(tracker, tmp_path) -> None:
    data = {"a": A, "b": B}
    evaluate_heldout(FakeEngine(), EvaluationData(data, data, uses_average=True), tracker, 7)
    (row,) = events(tmp_path)
    assert row["loss"] == {"a": 1.5, "b": 3, "mean": 2.25}
    assert "ema" not in row


def test_the_last_evaluation_has_more_text_and_warns_of_worse_sources(
    tracker, tmp_path, capsys
) -> None:
    full = {"a": A, "b": B}
    data = EvaluationData(full, {"a": A.select(slice(0, 1)), "b": B})
    evaluate_heldout(FakeEngine(), data, tracker, 0)
    worse = text([[0, 3, 3, 3], [3, 1, 1, 1]], [[0, 0, 0, 0], [0, 1, 1, 1]])
    loop = {"a": worse.select(slice(0, 1)), "b": B}
    evaluate_heldout(
        FakeEngine(scale=0.99), EvaluationData({"a": worse, "b": B}, loop), tracker, 9, True
    )
    first, last, warning = events(tmp_path)
    assert "loop" not in first
    assert last["loss"]["a"] == pytest.approx(0.99 * 2)
    assert last["loop"]["loss"]["a"] == pytest.approx(0.99 * 3)
    assert last["loop"]["tokens"] == {"a": 3, "b": 3}
    assert last["text"] != last["loop"]["text"]
    bits = 0.99 * np.array([9, 3]) / math.log(2)
    assert last["clusters"]["a"]["bits"] == pytest.approx(bits, abs=1e-3)
    assert last["clusters"]["a"]["bytes"] == [12, 12]
    before, after = 8 / math.log(2) / 12, 0.99 * 9 / math.log(2) / 12
    assert warning["event"] == "heldout_worse"
    assert warning["bits_per_byte"] == {"a": pytest.approx([before, after])}
    out = capsys.readouterr().out
    assert "step 9: 9 held-out tokens of 3 documents evaluated in " in out
    assert (
        f"WARNING: held-out text of a is worse than at the start of the run: {before:.3f} -> "
        in out
    )
    assert "mean (equal weights) " in out


def test_an_evaluation_within_the_run_is_a_twentieth_of_its_interval(compose) -> None:
    config = OmegaConf.to_object(compose())
    steps, tokens = config.evaluation.every_steps, config.batch.tokens_per_step
    found = heldout_evaluation._compute_loop_tokens(config, 3)
    assert found == pytest.approx(0.05 * 3 * steps * tokens / 3, abs=1)
    config = OmegaConf.to_object(compose("evaluation.every_steps=1"))
    assert heldout_evaluation._compute_loop_tokens(config, 3) == 4096


def test_the_number_of_sequences_follows_the_settings(compose) -> None:
    def load(*overrides: str):
        counts = []
        rows = text([[0, 1]] * 9000, [[0, 0]] * 9000)

        class Loader:
            def build_heldout_sequences(self, count):
                counts.append(count)
                return {"a": rows.select(slice(0, count))}

        config = OmegaConf.to_object(compose("batch.sequence_length=8", *overrides))
        data = load_evaluation_data(config, Loader())
        return counts[0], len(data.heldout["a"].documents), len(data.loop["a"].documents)

    assert load("evaluation.every_steps=1") == (8192, 8192, 512)
    assert load("evaluation.tokens_per_source=800") == (100, 100, 100)
    assert load("evaluation.sequences_per_source=3", "evaluation.every_steps=1") == (3, 3, 3)


def test_a_slow_evaluation_prints_its_progress(tracker, capsys, monkeypatch) -> None:
    monkeypatch.setattr(heldout_evaluation, "_SLOW_EVALUATION_S", 0.0)
    data = {"a": B, "b": B}
    evaluate_heldout(FakeEngine(), EvaluationData(data, data), tracker, 3)
    progress, result = capsys.readouterr().out.splitlines()
    assert progress.startswith("step 3: evaluated a, 1 of 2 sources in ")
    assert result.startswith("step 3: held-out bits per byte")
