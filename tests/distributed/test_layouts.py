"""Every layout trains like one process: losses, norms and gradients."""

import pytest

from hlat.config.resolve import resolve
from hlat.config.run import Config
from tests.distributed import checks
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.distributed

MODEL = [
    "model.num_layers=6",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=131",
    "batch.global_batch_size=16",
    "batch.sequence_length=32",
]
LAYOUTS = {
    "dp2": "dp=2",
    "dp4": "dp=4",
    "dp2+zero1": "dp=2 zero=1",
    "tp2": "tp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "tp4": "tp=4",
    "tp4+sp": "tp=4 sequence_parallel=true",
    "pp2": "pp=2",
    "pp4": "pp=4",
    "tp2+pp2": "tp=2 pp=2",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
    "tp4+sp+dp2+zero1": "tp=4 sequence_parallel=true dp=2 zero=1",
}
SEVERAL = {
    "interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=3",
    "zero bubble": "pp=2 pipeline_schedule=zero_bubble stages_per_rank=2",
    "interleaved+tp2+sp": "pp=2 pipeline_schedule=interleaved stages_per_rank=2 tp=2 sequence_parallel=true",
}
STEPS = 20
CASES = {
    f"{name}-{accumulation}": (layout, accumulation)
    for name, layout in (LAYOUTS | SEVERAL).items()
    for accumulation in ((1, 4) if name in LAYOUTS else (2, 4))
}


@pytest.fixture(scope="module")
def configure(compose):
    def make(layout: str = "", *overrides: str, accumulation: int = 4) -> Config:
        settings = layout.split()
        dp = next((int(s.removeprefix("dp=")) for s in settings if s.startswith("dp=")), 1)
        micro = f"batch.micro_batch_size={16 // (dp * accumulation)}"
        layout_overrides = (f"parallelism.{setting}" for setting in settings)
        return resolve(compose(*MODEL, micro, *layout_overrides, *overrides))

    return make


@pytest.fixture(scope="module")
def alone(configure):
    """What one process finds."""
    return checks.train(configure(), STEPS)


@pytest.mark.parametrize(("layout", "accumulation"), CASES.values(), ids=CASES)
def test_numbers_are_those_of_one_process(
    ranks: Ranks, configure, alone, layout: str, accumulation: int
) -> None:
    config = configure(layout, accumulation=accumulation)
    found = ranks.run(config.num_processes, checks.train, config, STEPS)
    for rows in found:
        for row, expected in zip(rows, alone, strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
    assert all(rows == found[0] for rows in found)
