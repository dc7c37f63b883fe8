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
NAMES = [*LAYOUTS]


def _some(saved: str) -> list[str]:
    """Of the other layouts the first, the last and the one that follows."""
    following = NAMES[(NAMES.index(saved) + 1) % len(NAMES)]
    return [name for name in NAMES if name != saved and name in (NAMES[0], NAMES[-1], following)]


CASES = [
    *(pytest.param("fp32", saved, _some(saved), id=f"fp32-{saved}") for saved in NAMES),
    *(
        pytest.param(
            *("fp32", saved, [name for name in NAMES if name not in (saved, *_some(saved))]),
            id=f"fp32-{saved}-others",
            marks=pytest.mark.slow,
        )
        for saved in NAMES
    ),
    # The way of master weights; which layout meets which is the same
    pytest.param("mixed", "alone", ["dp2", NAMES[-1]], id="mixed-alone"),
    pytest.param("mixed", NAMES[-1], ["alone", "tp2+pp2"], id=f"mixed-{NAMES[-1]}"),
]


@pytest.mark.parametrize(("recipe", "saved", "loaded"), CASES)
def test_every_layout_goes_on_from_what_it_saved(
    ranks: Ranks, configure, tmp_path, recipe: str, saved: str, loaded: list[str]
) -> None:
    def run(name, check, *arguments):
        config = configure(LAYOUTS[name], layers("pp=2"), f"precision={recipe}")
        if config.num_processes == 1:
            return check(config, *arguments)
        return ranks.run(config.num_processes, check, config, *arguments)[0]

    expected = run(saved, checks.save_and_go_on, tmp_path, STEPS)
    path = tmp_path / "step_00000003"
    assert run(saved, checks.go_on, path, STEPS) == expected  # to the last bit
    for name in loaded:
        found = run(name, checks.go_on, path, STEPS)
        # In bf16 a layout computes other roundings, as tests of layouts tell
        tolerance = 1e-6 if recipe == "fp32" else 2e-3
        assert found[0][0] == pytest.approx(expected[0][0], rel=tolerance), name
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=10 * tolerance), name
