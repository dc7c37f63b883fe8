"""The arithmetic of slices."""

import itertools

import pytest

from hlat.checkpoint.box import Box, tiles


def test_overlap_is_the_common_part() -> None:
    one, other = Box((0, 2), (4, 4)), Box((3, 0), (4, 3))
    assert one.overlap(other) == other.overlap(one) == Box((3, 2), (1, 1))
    assert one.overlap(Box((4, 0), (1, 9))) is None
    assert one.overlap(one) == one


def test_overlap_equals_that_of_the_sets_of_indices() -> None:
    boxes = [Box((begin,), (size,)) for begin in range(4) for size in range(4)]
    for one, other in itertools.product(boxes, boxes):
        common = _indices(one) & _indices(other)
        found = one.overlap(other)
        assert (_indices(found) if found else set()) == common


def _indices(box: Box) -> set[int]:
    return set(range(box.offset[0], box.offset[0] + box.size[0]))


def test_a_scalar_is_a_box_of_one_element() -> None:
    scalar = Box((), ())
    assert scalar.count == 1
    assert scalar.overlap(scalar) == scalar
    assert scalar.within(scalar) == ()
    assert tiles([scalar], ())


def test_within_is_an_index_relative_to_the_other_box() -> None:
    assert Box((5, 2), (2, 1)).within(Box((4, 2), (6, 3))) == (slice(1, 3), slice(0, 1))


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([Box((0, 0), (2, 3))], True),
        ([Box((0, 0), (1, 3)), Box((1, 0), (1, 3))], True),
        ([Box((0, 0), (1, 3)), Box((1, 0), (1, 2)), Box((1, 2), (1, 1))], True),
        ([Box((0, 0), (2, 3)), Box((2, 0), (0, 3))], True),
        ([], False),
        ([Box((0, 0), (1, 3))], False),
        ([Box((0, 0), (1, 3)), Box((0, 0), (1, 3))], False),
        ([Box((0, 0), (1, 3)), Box((2, 0), (1, 3))], False),
        ([Box((0, 0), (3, 2))], False),
        ([Box((0,), (6,))], False),
    ],
)
def test_tiles_means_every_element_exactly_once(boxes: list[Box], covered: bool) -> None:
    assert tiles(boxes, (2, 3)) is covered
