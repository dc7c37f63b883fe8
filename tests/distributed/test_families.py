"""Every model family trains in tensor, pipeline and data parallel layouts like one process.

docs/generate_family_table.py writes the results to docs/models.md.
"""

import functools

import numpy as np
import pytest

from hlat.config.run import Config
from hlat.model.families import FAMILY_NAMES
from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks
from tests.distributed.test_layouts import assert_rows_equal

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

COLUMNS = {
    "TP": ["tp=4 sequence_parallel=true", "tp=4"],
    "PP": ["pp=2", "tp=2 pp=2 dp=2 zero=1"],
    "ZeRO": ["dp=2 zero=1", "dp=2 zero=2", "pp=2 dp=2 zero=3"],
}
"""Layouts by column of the table; TP with more ranks than key/value heads."""
DEFAULT_LAYOUT, DEFAULT_FAMILIES = "tp=2 pp=2 dp=2 zero=1", {"gemma3"}
STEPS = 2


@pytest.fixture(scope="module")
def configure_family(configure):
    """Configure a small model of a family; its window is shorter than the sequences."""

    def make(family: str, layout: str, *overrides: str) -> Config:
        config = configure(layout, f"model={family}_tiny", *overrides)
        if config.model.attention.sliding_window is None:
            return config
        window = "model.attention.sliding_window=9"
        return configure(layout, f"model={family}_tiny", window, *overrides)

    return make


@pytest.fixture(scope="module")
def single_process(configure_family):
    @functools.cache
    def train(family: str, num_layers: str) -> checks.TrainingRecord:
        return checks.train_and_record(configure_family(family, "", num_layers), STEPS)

    return train


@pytest.mark.parametrize(
    ("family", "column", "layout"),
    [
        pytest.param(
            family,
            column,
            layout,
            marks=[]
            if layout == DEFAULT_LAYOUT and family in DEFAULT_FAMILIES
            else [pytest.mark.slow],
        )
        for family in FAMILY_NAMES
        for column, layouts in COLUMNS.items()
        for layout in layouts
    ],
)
def test_training_equals_one_process(
    ranks: Ranks, configure_family, single_process, record_property, family, column, layout
) -> None:
    """Compare losses and norms, and after one step each gradient."""
    record_property("family", family)
    record_property("column", column)
    config = configure_family(family, layout)
    found = ranks.run(config.num_processes, checks.train_and_record, config, STEPS)
    expected = single_process(family, layers(layout))
    assert_rows_equal(found[0].rows, expected.rows)
    assert all(record.rows == found[0].rows for record in found)
    tensors, others = (
        checks.joined([record.shards for record in records]) for records in (found, [expected])
    )
    assert tensors.keys() == others.keys()
    for key, whole in others.items():
        if key.startswith("exp_avg/"):
            assert np.abs(tensors[key] - whole).max() <= 1e-5 * np.abs(whole).max(), key
