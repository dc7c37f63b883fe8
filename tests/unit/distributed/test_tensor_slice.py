"""Arithmetic of tensor slices."""

import itertools

import pytest

from hlat.distributed.tensor_slice import TensorSlice
from tests.support.tensor_slices import is_partition


def test_intersection() -> None:
    one, other = TensorSlice((0, 2), (4, 4)), TensorSlice((3, 0), (4, 3))
    assert one.intersect(other) == other.intersect(one) == TensorSlice((3, 2), (1, 1))
    assert one.intersect(TensorSlice((4, 0), (1, 9))) is None
    assert one.intersect(one) == one


def test_intersection_equals_that_of_index_sets() -> None:
    slices = [TensorSlice((begin,), (size,)) for begin in range(4) for size in range(4)]
    for one, other in itertools.product(slices, slices):
        common = _indices(one) & _indices(other)
        found = one.intersect(other)
        assert (_indices(found) if found else set()) == common


def _indices(tensor_slice: TensorSlice) -> set[int]:
    return set(range(tensor_slice.offset[0], tensor_slice.offset[0] + tensor_slice.size[0]))


def test_a_scalar_has_one_element() -> None:
    scalar = TensorSlice((), ())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.index_in(scalar) == ()
    assert is_partition([scalar], ())


def test_index_in_is_relative_to_the_other_slice() -> None:
    assert TensorSlice((5, 2), (2, 1)).index_in(TensorSlice((4, 2), (6, 3))) == (
        slice(1, 3),
        slice(0, 1),
    )


@pytest.mark.parametrize(
    ("slices", "covered"),
    [
        ([TensorSlice((0, 0), (2, 3))], True),
        ([TensorSlice((0, 0), (1, 3)), TensorSlice((1, 0), (1, 3))], True),
        (
            [TensorSlice((0, 0), (1, 3)), TensorSlice((1, 0), (1, 2)), TensorSlice((1, 2), (1, 1))],
            True,
        ),
        ([TensorSlice((0, 0), (2, 3)), TensorSlice((2, 0), (0, 3))], True),
        ([], False),
        ([TensorSlice((0, 0), (1, 3))], False),
        ([TensorSlice((0, 0), (1, 3)), TensorSlice((0, 0), (1, 3))], False),
        ([TensorSlice((0, 0), (1, 3)), TensorSlice((2, 0), (1, 3))], False),
        ([TensorSlice((0, 0), (3, 2))], False),
        ([TensorSlice((0,), (6,))], False),
    ],
)
def test_tiles_means_every_element_exactly_once(slices: list[TensorSlice], covered: bool) -> None:
    assert is_partition(slices, (2, 3)) is covered
