"""Grid of learning rates as an axis of a sweep."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.lr_grid import list_rates
from hlat.config.study import LrGridConfig
from hlat.config.sweep_axes import is_sweep, load_sweep_axes


def test_the_grid_is_geometric_around_the_rate_of_the_preset():
    sweep = load_sweep_axes(["study.lr_grid.factor=2", "optimizer=lion", "run.seed=1,2"])
    assert sweep.axes["optimizer.lr"] == [
        *("2.5e-05", "5e-05", "0.0001", "0.0002", "0.0004", "0.0008", "0.0016")
    ]
    assert sweep.axes["run.seed"] == ["1", "2"]
    assert is_sweep(["study.lr_grid.factor=2"])


def test_an_extended_grid_contains_the_grid():
    grid = list_rates(LrGridConfig(factor=2**0.5, below=2, above=2), 2e-3)
    extended = list_rates(LrGridConfig(factor=2**0.5, below=2, above=5), 2e-3)
    assert extended[:5] == grid
    assert len(extended) == 8


def test_listed_rates_replace_the_grid():
    sweep = load_sweep_axes(["study.lr_grid.factor=2", "optimizer.lr=1e-3,2e-3,4e-3"])
    assert sweep.axes["optimizer.lr"] == ["0.001", "0.002", "0.004"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["study.lr_grid.factor=1"], "study.lr_grid.factor=1.0 is outside (1, 100]"),
        (["study.lr_grid.below=0", "study.lr_grid.above=1"], "too few rates for an optimum"),
        (["optimizer.lr=1e-3"], "set study.lr_grid.center=0.001 instead"),
        (["optimizer=lion,muon"], "set study.lr_grid.center, such as study.lr_grid.center=0.002"),
        (["study.lr_grid.factor=10", "study.lr_grid.center=1e306"], "reduce it"),
    ],
)
def test_an_invalid_grid_names_its_remedy(overrides, problem):
    words = [] if "factor" in overrides[0] else ["study.lr_grid.factor=2"]
    with pytest.raises(ConfigError) as error:
        load_sweep_axes([*words, *overrides])
    assert problem in str(error.value)


def test_rates_of_listed_groups_need_no_preset():
    sweep = load_sweep_axes(
        ["study.lr_grid.factor=2", "study.lr_grid.center=1e-3", "optimizer=adamw_tiny,muon"]
    )
    assert sweep.axes["optimizer.lr"][3] == "0.001"
