"""Statistics of routers in every layout are those of one process."""

import pytest

from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed import checks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

MOE = ["model.mlp.kind=moe", "model.mlp.moe.num_experts=8", "model.num_layers=3"]
LAYOUTS = {
    "recomputed": "activation_checkpointing=full",
    "dp2": "dp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "pp2": "pp=2",
    "dp2+zero3": "dp=2 zero=3",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
    "zero bubble": "pp=2 pipeline_schedule=zero_bubble stages_per_rank=2",
}
SLOW = {"tp2+pp2+dp2+zero1", "zero bubble", "dp2+zero3"}


def record_metrics(config: Config, steps: int = 3) -> list[dict]:
    """Return the metrics of the model after each step; evaluations between them do not count."""
    engine = NativeEngine()
    engine.build(config)
    rows = []
    for batch in checks.batches(config, steps):
        sequences = checks.shard_batch(batch, engine)
        metrics = engine.train_step(sequences, checks.RATE)
        engine.eval_step(sequences)
        rows.append(engine.read_metrics(metrics).model_metrics)
    engine.close()
    return rows


@pytest.fixture(scope="module")
def expected(configure) -> dict[str, list[dict]]:
    return {n: record_metrics(configure("", *MOE, f"model.num_layers={n}")) for n in ("3", "4")}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_statistics_equal_one_process(ranks: Ranks, configure, expected, layout: str) -> None:
    num_layers = "4" if "bubble" in layout else "3"
    settings = [*MOE, f"model.num_layers={num_layers}", "batch.micro_batch_size=2"]
    config = configure(LAYOUTS[layout], *settings)
    found = ranks.run(config.num_processes, record_metrics, config)
    assert all(rows == found[0] for rows in found)
    for row, other in zip(found[0], expected[num_layers], strict=True):
        assert len(other["router_violations"]) == int(num_layers)
        assert min(other["router_violations"]) > 0
        entropy, expected_entropy = row.pop("router_entropy"), other["router_entropy"]
        assert row == {key: other[key] for key in row}
        assert entropy == pytest.approx(expected_entropy, rel=1e-5)
