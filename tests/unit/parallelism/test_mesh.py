"""Degrees and places of ranks."""

import pytest

from hlat.config.errors import ConfigError
from hlat.config.parallelism import Parallelism
from hlat.parallelism.mesh import Coordinates, Degrees, coordinates, degrees, rank


def test_dp_is_what_tp_and_pp_leave() -> None:
    assert degrees(Parallelism(), 1) == Degrees(1, 1, 1)
    assert degrees(Parallelism(tp=8), 64 * 32) == Degrees(dp=256, tp=8)
    assert degrees(Parallelism(tp=32, pp=8), 256 * 32) == Degrees(dp=32, tp=32, pp=8)
    assert degrees(Parallelism(tp=2, dp=3), 6) == Degrees(dp=3, tp=2)


def test_processes_that_tp_and_pp_do_not_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"tp=4 x parallelism\.pp=1 = 4 .* 6 processes .*tp=1, 2, 3, 6"
    ):
        degrees(Parallelism(tp=4), 6)
    with pytest.raises(ConfigError, match=r"with pp=8, use parallelism\.tp=1, 2, 4, 8, 16$"):
        degrees(Parallelism(tp=32, pp=8), 128)
    with pytest.raises(ConfigError, match="a multiple of 6"):
        degrees(Parallelism(tp=2, pp=3), 4)


def test_dp_that_does_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"parallelism\.dp=4 .* = 8 processes.* has 6; set parallelism\.dp=3"
    ):
        degrees(Parallelism(tp=2, dp=4), 6)


def test_order_is_pp_dp_tp() -> None:
    mesh = Degrees(dp=2, tp=2, pp=2)
    places = [coordinates(number, mesh) for number in range(mesh.num_processes)]
    assert [(p.pp, p.dp, p.tp) for p in places] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_rank_inverts_coordinates() -> None:
    mesh = Degrees(dp=3, tp=4, pp=5)
    assert [rank(coordinates(number, mesh), mesh) for number in range(60)] == list(range(60))
    assert rank(Coordinates(dp=2, tp=3, pp=4), mesh) == 59
