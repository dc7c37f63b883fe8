"""Every layout trains like one process: losses, norms and gradients."""

import numpy as np
import pytest

from hlat.checkpoint.box import Box, tiles
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


ONE_STEP = ["tp4+sp+dp2+zero1", "tp2+pp2+dp2+zero1", "tp4", "pp4", "dp4"]


@pytest.mark.parametrize("name", ONE_STEP)
def test_every_gradient_is_that_of_one_process(ranks: Ranks, configure, name: str) -> None:
    """The first moment after one step is the clipped gradient times 1 - beta1."""
    config = configure(LAYOUTS[name])
    pieces: dict[str, list[tuple[Box, np.ndarray]]] = {}
    for found in ranks.run(config.num_processes, checks.moments, config):
        for (parameter, offset), values in found.items():
            pieces.setdefault(parameter, []).append((Box(offset, values.shape), values))
    expected = {parameter: values for (parameter, _), values in checks.moments(configure()).items()}
    assert pieces.keys() == expected.keys()
    for parameter, whole in expected.items():
        assert tiles([box for box, _ in pieces[parameter]], whole.shape)
        joined = np.empty_like(whole)
        every = Box((0,) * whole.ndim, whole.shape)
        for box, values in pieces[parameter]:
            joined[box.within(every)] = values
        assert np.abs(joined - whole).max() <= 1e-5 * np.abs(whole).max(), parameter


# Layouts add up in other orders: about sqrt(steps) roundings of bf16, 2^-9, of the largest part
RECIPES = {"fp32": 1e-5, "mixed": 2e-3, "bf16": 4e-3, "bf16_sr": 4e-3, "bf16_sr_master": 4e-3}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_in_three_dimensions(ranks: Ranks, configure, recipe: str) -> None:
    layout = "tp=2 sequence_parallel=true pp=2 dp=2 zero=1"
    config = configure(layout, f"precision={recipe}")
    found = ranks.run(8, checks.train, config, 6)
    alone = checks.train(configure("", f"precision={recipe}"), 6)
    assert all(rows == found[0] for rows in found)
    for row, expected in zip(found[0], alone, strict=True):
        assert row[0] == pytest.approx(expected[0], rel=RECIPES[recipe])
        assert row[1:] == pytest.approx(expected[1:], rel=10 * RECIPES[recipe])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_computed_again_says_the_same(ranks: Ranks, configure, alone, mode: str) -> None:
    layout = f"tp=2 sequence_parallel=true pp=2 activation_checkpointing={mode}"
    config = configure(layout)
    for found in ranks.run(config.num_processes, checks.train, config, 4):
        for row, expected in zip(found[:4], alone[:4], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def test_documents_are_heard_of_on_every_rank(ranks: Ranks, configure) -> None:
    """Masks of documents, and a loss whose terms differ from rank to rank."""
    masks = ("data.document_mask=true", "data.loss_mask=true")
    config = configure("tp=2 sequence_parallel=true pp=2 dp=2", *masks)
    alone = checks.train(configure("", *masks), 4)
    for found in ranks.run(config.num_processes, checks.train, config, 4):
        for row, expected in zip(found, alone, strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("recipe", ["bf16_sr", "mixed"])
def test_copies_of_a_weight_stay_copies(ranks: Ranks, configure, recipe: str) -> None:
    """Replicated norms and key/value heads, and the weights of all replicas, after some steps."""
    config = configure("tp=4 sequence_parallel=true dp=2 zero=1", f"precision={recipe}")
    digests: dict[tuple, set[str]] = {}
    for found in ranks.run(8, checks.digests, config, 4):
        for key, digest in found.items():
            digests.setdefault(key, set()).add(digest)
    assert all(len(same) == 1 for same in digests.values())
