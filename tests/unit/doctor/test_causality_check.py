"""The tolerance of causality depends on the roundings that other tokens change."""

import pytest

from hlat.config.resolve import resolve_config
from hlat.doctor.causality_check import _compute_tolerance
from hlat.doctor.tolerances import compute_gradient_tolerance


@pytest.mark.parametrize(
    ("overrides", "counts_forward_pass"),
    [
        ([], False),
        (["model=olmoe_tiny"], True),
        (
            ["model=olmoe_tiny", "model.mlp.moe.experts_per_token=${model.mlp.moe.num_experts}"],
            False,
        ),
    ],
)
def test_selection_of_experts_changes_roundings(compose, overrides, counts_forward_pass) -> None:
    config = resolve_config(compose("precision=fp32", *overrides))
    expected = compute_gradient_tolerance(config) if counts_forward_pass else 4 * 2.0**-24
    assert _compute_tolerance(config) == expected
