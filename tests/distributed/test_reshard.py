"""A checkpoint of one layout loads in every other layout."""

import pytest

from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUTS = {
    "single": "",
    "dp2": "dp=2",
    "dp2+zero1": "dp=2 zero=1",
    "dp2+zero3": "dp=2 zero=3",
    "dp4+zero3+replicas": "dp=4 zero=3 dp_replicate=2",
    "tp2": "tp=2",
    "pp2": "pp=2",
    "tp2+pp2": "tp=2 pp=2",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
}
STEPS = 2
NAMES = [*LAYOUTS]


DEFAULT = {
    "single": ["dp2+zero3"],
    "dp2+zero3": ["tp2+pp2+dp2+zero1"],
    "dp4+zero3+replicas": ["dp2+zero1"],
    "tp2+pp2+dp2+zero1": ["single"],
}
"""Layouts that load the checkpoint of a layout in the default suite."""


def _list_others(saved: str) -> list[str]:
    return [name for name in NAMES if name not in (saved, *DEFAULT.get(saved, []))]


CASES = [
    *(pytest.param("fp32", *case, id=f"fp32-{case[0]}") for case in DEFAULT.items()),
    pytest.param("mixed", "dp2+zero1", ["tp2+pp2"], id="mixed-dp2+zero1"),  # has master weights
    *(
        pytest.param(*case, id=f"{case[0]}-{case[1]}-others", marks=pytest.mark.slow)
        for case in [
            *(("fp32", saved, _list_others(saved)) for saved in NAMES),
            *(("mixed", "single", ["dp2", NAMES[-1]]), ("mixed", NAMES[-1], ["single", "tp2+pp2"])),
        ]
    ),
]


@pytest.mark.parametrize(("recipe", "saved", "loaded"), CASES)
@pytest.mark.slow_after(2)
def test_checkpoint_loads_in_another_layout(
    ranks: Ranks, configure, tmp_path, recipe: str, saved: str, loaded: list[str]
) -> None:
    def run(name, check, *arguments):
        config = configure(LAYOUTS[name], layers("pp=2"), f"precision={recipe}")
        if config.num_processes == 1:
            return check(config, *arguments)
        return ranks.run(config.num_processes, check, config, *arguments)[0]

    expected = run(saved, checks.save_and_continue, tmp_path, STEPS)
    path = tmp_path / f"step_{STEPS:08}"
    assert run(saved, checks.load_and_continue, path, STEPS) == expected  # bit-identical
    for name in loaded:
        found = run(name, checks.load_and_continue, path, STEPS)
        # Layouts round differently in bf16; see test_layouts.py
        tolerance = 1e-6 if recipe == "fp32" else 2e-3
        assert found[0][0] == pytest.approx(expected[0][0], rel=tolerance), name
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=10 * tolerance), name
