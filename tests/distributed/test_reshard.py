"""What one layout saves, every other one goes on from."""

import pytest

from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUTS = {
    "alone": "",
    "dp2": "dp=2",
    "dp2+zero1": "dp=2 zero=1",
    "dp2+zero3": "dp=2 zero=3",
    "tp2": "tp=2",
    "pp2": "pp=2",
    "tp2+pp2": "tp=2 pp=2",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
}
STEPS = 3


CASES = [("fp32", saved) for saved in LAYOUTS] + [("mixed", "alone"), ("mixed", [*LAYOUTS][-1])]


@pytest.mark.parametrize(("recipe", "saved"), CASES)
def test_every_layout_goes_on_from_what_it_saved(
    ranks: Ranks, configure, tmp_path, recipe: str, saved: str
) -> None:
    def run(name, check, *arguments):
        config = configure(LAYOUTS[name], layers("pp=2"), f"precision={recipe}")
        if config.num_processes == 1:
            return check(config, *arguments)
        return ranks.run(config.num_processes, check, config, *arguments)[0]

    expected = run(saved, checks.save_and_go_on, tmp_path, STEPS)
    path = tmp_path / "step_00000003"
    assert run(saved, checks.go_on, path, STEPS) == expected  # to the last bit
    loaded = [name for name in LAYOUTS if name != saved]
    if recipe == "mixed":  # the way of master weights; which layout meets which is the same
        loaded = loaded[:1] + loaded[-1:]
    for name in loaded:
        found = run(name, checks.go_on, path, STEPS)
        # In bf16 a layout computes other roundings, as tests of layouts tell
        tolerance = 1e-6 if recipe == "fp32" else 2e-3
        assert found[0][0] == pytest.approx(expected[0][0], rel=tolerance), name
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=10 * tolerance), name
