"""Every component trains in every layout like one process: losses, norms and gradients.

A new component needs one line in tests/support/model_components.py. The default cases contain the
components that add parameters, in layouts with replicated key/value heads, and a tied head in
pipeline stages; all others are slow.
"""

import functools

import numpy as np
import pytest

from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks
from tests.distributed.test_layouts import assert_rows_equal
from tests.distributed.test_texts import LARGE_INIT, score_and_generate
from tests.support.model_components import COMPONENTS

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUTS = {
    "tp4+sp": "tp=4 sequence_parallel=true",
    "tp4": "tp=4",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
    "pp2+dp2+zero3": "pp=2 dp=2 zero=3",
    "interleaved+dp2": "pp=2 pipeline_schedule=interleaved stages_per_rank=3 dp=2",
    "dp2+zero2": "dp=2 zero=2",
    "tp4+sp+dp2+zero3": "tp=4 sequence_parallel=true dp=2 zero=3",
}
RECIPES = {"mixed": 2e-3, "bf16": 1e-2, "bf16_sr": 1e-2}
"""Relative tolerance of a recipe: layouts add up in other orders."""
STEPS = 3
DEFAULT_LAYOUTS = {
    "qk_norm projection": {"tp4+sp"},
    "tied head": {"tp2+pp2+dp2+zero1"},
}
"""Layouts of the default cases by component, each with a parameter of which tensor-parallel ranks
have a part of the gradient."""
CASES = [
    pytest.param(
        component,
        layout,
        marks=[] if layout in DEFAULT_LAYOUTS.get(component, ()) else [pytest.mark.slow],
    )
    for component in COMPONENTS
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def single_process(configure):
    """Return the record of one process with the layers and overrides of a layout."""

    @functools.cache
    def train(overrides: tuple[str, ...]) -> checks.TrainingRecord:
        return checks.train_and_record(configure("", *overrides), STEPS)

    return lambda *overrides: train(overrides)


@pytest.mark.parametrize(("component", "layout"), CASES)
@pytest.mark.slow
def test_training_equals_one_process(
    ranks: Ranks, configure, single_process, component: str, layout: str
) -> None:
    """Compare losses and norms, and after one step each gradient.

    The first moment after one step is the clipped gradient times 1 - beta1.
    """
    settings = COMPONENTS[component].split()
    config = configure(LAYOUTS[layout], *settings)
    found = ranks.run(config.num_processes, checks.train_and_record, config, STEPS)
    expected = single_process(layers(LAYOUTS[layout]), *settings)
    assert_rows_equal(found[0].rows, expected.rows)
    assert all(record.rows == found[0].rows for record in found)
    tensors, others = (
        checks.joined([record.shards for record in records]) for records in (found, [expected])
    )
    assert tensors.keys() == others.keys()
    for key, whole in others.items():
        if key.startswith("exp_avg/"):
            assert np.abs(tensors[key] - whole).max() <= 1e-5 * np.abs(whole).max(), key


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("component", COMPONENTS)
def test_recipes_in_a_layout(
    ranks: Ranks, configure, single_process, component: str, recipe: str
) -> None:
    layout = "tp=2 sequence_parallel=true dp=2 zero=1"
    settings = [f"precision={recipe}", *COMPONENTS[component].split()]
    config = configure(layout, *settings)
    expected = single_process(layers(layout), *settings)
    for rows in ranks.run(config.num_processes, checks.train, config, STEPS):
        assert_rows_equal(rows[:STEPS], expected.rows[:STEPS], RECIPES[recipe])


@pytest.mark.slow
@pytest.mark.parametrize("component", COMPONENTS)
def test_activation_checkpointing_and_document_masks(
    ranks: Ranks, configure, single_process, component: str
) -> None:
    layout = "tp=2 sequence_parallel=true dp=2"
    settings = ["data.document_mask=true", *COMPONENTS[component].split()]
    expected = single_process(layers(layout), *settings)
    for mode in ("selective", "full"):
        mode_setting = f"parallelism.activation_checkpointing={mode}"
        config = configure(layout, *settings, mode_setting)
        for rows in ranks.run(config.num_processes, checks.train, config, STEPS):
            assert_rows_equal(rows[:STEPS], expected.rows[:STEPS])


@pytest.mark.slow  # 6 s per case
@pytest.mark.parametrize(
    ("component", "layout"),
    [
        pytest.param(component, layout, marks=[] if layout in default else [pytest.mark.slow])
        for component in COMPONENTS
        for default in [{"tp=4"} if component == "qk_norm projection" else set()]
        for layout in ("tp=4", "tp=2 sequence_parallel=true pp=2 dp=2")
    ],
)
def test_generation_equals_one_process(
    ranks: Ranks, configure, component: str, layout: str
) -> None:
    settings = [LARGE_INIT, *COMPONENTS[component].split()]
    config = configure(layout, *settings)
    found = ranks.run(config.num_processes, score_and_generate, config)
    scores, greedy, samples, batched = score_and_generate(configure("", layers(layout), *settings))
    for result_scores, *result_tokens, result_batched in found:
        assert result_tokens == [greedy, samples]
        assert [one.token for one in result_batched] == [one.token for one in batched]
        for one, other in zip(result_scores, scores, strict=True):
            assert one[0] == pytest.approx(other[0], rel=1e-5)
            assert one[1] == other[1]
