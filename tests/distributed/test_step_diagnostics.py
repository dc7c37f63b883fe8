"""Diagnostics of a step in every layout are those of one process."""

import pytest

from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed import checks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

SETTINGS = ["model.num_layers=3", "batch.micro_batch_size=2"]
LAYOUTS = {
    "recomputed": "activation_checkpointing=full",
    "dp2+zero1": "dp=2 zero=1",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "pp2": "pp=2",
    "dp2+zero3": "dp=2 zero=3",
    "tp4": "tp=4",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
}
SLOW = {"tp2+pp2+dp2+zero1", "dp2+zero3", "tp4"}


def record_diagnostics(config: Config, steps: int = 3) -> list[tuple[float | None, dict]]:
    """Return loss and diagnostics of each step on this rank."""
    engine = NativeEngine()
    engine.build(config)
    rows = []
    for batch in checks.batches(config, steps):
        pending = engine.train_step(checks.shard_batch(batch, engine), checks.RATE, True)
        metrics = engine.read_metrics(pending)
        rows.append((metrics.loss, metrics.model_metrics))
    engine.close()
    return rows


@pytest.fixture(scope="module")
def expected(configure) -> list[tuple[float | None, dict]]:
    return record_diagnostics(configure("", *SETTINGS))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_diagnostics_equal_one_process(ranks: Ranks, configure, expected, layout: str) -> None:
    config = configure(LAYOUTS[layout], *SETTINGS)
    found = ranks.run(config.num_processes, record_diagnostics, config)
    assert all(not metrics for rows in found[1:] for _, metrics in rows)
    for (loss, row), (expected_loss, other) in zip(found[0], expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert row.keys() == other.keys()
        assert row.pop("attention_logits") == pytest.approx(other["attention_logits"], rel=1e-4)
        # Gradients near zero differ by rounding, and so do ratios to their second moments
        assert row == pytest.approx({key: other[key] for key in row}, rel=1e-3, abs=1e-6)
