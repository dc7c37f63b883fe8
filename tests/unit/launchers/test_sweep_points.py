"""Overrides of points in messages."""

from hydra_plugins.hlat_launchers._sweep_points import find_shared_overrides, format_swept

POINTS = [["model=tiny", "lr=1", "seed=1"], ["model=tiny", "lr=2", "seed=1"]]


def test_only_overrides_that_differ_are_shown() -> None:
    shared = find_shared_overrides(POINTS)
    assert shared == {"model=tiny", "seed=1"}
    assert [format_swept(point, shared) for point in POINTS] == ["lr=1", "lr=2"]


def test_all_overrides_of_a_single_point_are_shown() -> None:
    shared = find_shared_overrides(POINTS[:1])
    assert format_swept(POINTS[0], shared) == "model=tiny lr=1 seed=1"


def test_overrides_are_counted_once_for_all_points() -> None:
    """Points are read once, and not again for each of them."""

    class Point(list):
        num_reads = 0

        def __iter__(self):
            Point.num_reads += 1
            return super().__iter__()

        def __contains__(self, word):
            raise AssertionError("a point is searched")

    points = [Point([f"seed={number}", "model=tiny"]) for number in range(50)]
    shared = find_shared_overrides(points)
    assert Point.num_reads == 50
    assert [format_swept(point, shared) for point in points[:2]] == ["seed=0", "seed=1"]
