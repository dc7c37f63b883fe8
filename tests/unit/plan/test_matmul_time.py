"""Tiles and memory traffic of matmuls against manual examples."""

import pytest

from hlat.plan.matmul_time import (
    Matmul,
    MatmulSpeed,
    compute_matmul_time,
    compute_tile_utilization,
)


def test_gradients_have_the_same_flops():
    matmul = Matmul(4096, 1024, 3072, 2)
    assert matmul.flops == 2 * 2 * 4096 * 1024 * 3072
    assert matmul.num_weights == 2 * 1024 * 3072
    assert matmul.num_elements == matmul.num_weights + 2 * 4096 * (1024 + 3072)
    assert [one.flops for one in matmul.gradients] == [matmul.flops] * 2
    assert matmul.gradients == (Matmul(4096, 3072, 1024, 2), Matmul(3072, 4096, 1024, 2))


@pytest.mark.parametrize(
    ("rows", "outputs", "num_multiprocessors", "expected"),
    [
        (256, 128, 1, 1.0),
        (27 * 256, 4 * 128, 108, 1.0),  # one wave of an A100
        (1792, 1792, 108, 1792**2 / (108 * 256 * 128)),  # 98 tiles, the example of the guide
        (2304, 1792, 108, 2304 * 1792 / (3 * 108 * 128 * 128)),  # 252 tiles in three waves
        (130, 128, 2, 130 / 256),  # the second tile has two rows
    ],
)
def test_utilization_of_tiles_and_waves(rows, outputs, num_multiprocessors, expected):
    matmul = Matmul(rows, 64, outputs)
    assert compute_tile_utilization(matmul, num_multiprocessors) == pytest.approx(expected)


def test_long_inner_dimensions_are_split():
    """64 tiles of 128 x 128 of a gradient of weights occupy half of 128 multiprocessors."""
    assert compute_tile_utilization(Matmul(1024, 512, 1024), 128) == pytest.approx(0.5)
    assert compute_tile_utilization(Matmul(1024, 65536, 1024), 128) == pytest.approx(1.0)


def test_time_is_that_of_flops_or_of_memory():
    speed = MatmulSpeed(flops=1e12, memory=1e9, itemsize=2, num_multiprocessors=1)
    large = Matmul(4096, 65536, 4096)
    assert compute_matmul_time(large, speed) == pytest.approx(2 * 4096**2 * 65536 / 1e12)
    thin = Matmul(256, 4096, 128)
    elements = 256 * 4096 + 4096 * 128 + 256 * 128
    assert compute_matmul_time(thin, speed) == pytest.approx(2 * elements / 1e9)
    flops_only = MatmulSpeed(1e12, 1e9, 2, None)
    assert compute_matmul_time(thin, flops_only) == thin.flops / 1e12
