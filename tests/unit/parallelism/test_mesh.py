"""Degrees and places of ranks."""

from hlat.config.parallelism import Parallelism
from hlat.parallelism.mesh import Coordinates, Degrees, coordinates, degrees, rank


def test_dp_is_what_tp_and_pp_leave() -> None:
    assert degrees(Parallelism(), 1) == Degrees(1, 1, 1)
    assert degrees(Parallelism(tp=8), 64 * 32) == Degrees(dp=256, tp=8)
    assert degrees(Parallelism(tp=32, pp=8), 256 * 32) == Degrees(dp=32, tp=32, pp=8)
    assert degrees(Parallelism(tp=2, dp=3), 6) == Degrees(dp=3, tp=2)


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
