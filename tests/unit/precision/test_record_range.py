"""Ranges are recorded within a profiled step only."""

import torch
from torch.profiler import profile

from hlat.precision.record_range import record_range, record_ranges


@record_range("rounding")
def double(value: torch.Tensor, factor: int = 2) -> torch.Tensor:
    """Return a multiple."""
    return value * factor


def list_names(recorded: profile) -> list[str]:
    return [event.name for event in recorded.events()]


def test_functions_keep_their_result_and_documentation() -> None:
    assert double(torch.tensor(3.0), factor=4) == 12
    assert double.__doc__ == "Return a multiple."
    with record_ranges():
        assert double(torch.tensor(3.0)) == 6


def test_ranges_need_the_context() -> None:
    with profile() as outside:
        double(torch.ones(2))
    with profile() as inside, record_ranges():
        double(torch.ones(2))
    assert "hlat::rounding" not in list_names(outside)
    assert list_names(inside).count("hlat::rounding") == 1
