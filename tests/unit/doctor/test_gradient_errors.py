"""Errors of gradients whose terms cancel are relative to the gradients of their module."""

import numpy as np
import pytest

from hlat.doctor.gradient_errors import compute_relative_errors


@pytest.fixture
def exact():
    generator = np.random.default_rng(0)
    return {
        "norm.slope": np.array([1e-6]),
        "norm.weight": generator.standard_normal(16),
        "norm.bias": generator.standard_normal(16),
        "k_proj.weight": generator.standard_normal((8, 16)),
        "k_proj.bias": np.zeros(8),
    }


def test_the_error_of_a_bias_without_gradient_is_that_of_its_weight_for_an_input(exact) -> None:
    measured = {"k_proj.bias": np.full(8, 1e-3)}
    norm = np.linalg.norm(exact["k_proj.weight"]) / 4
    error = compute_relative_errors(measured, exact)["k_proj.bias"]
    assert error == pytest.approx(np.sqrt(8) * 1e-3 / norm)


def test_the_error_of_an_element_is_relative_to_its_module(exact) -> None:
    errors = compute_relative_errors({"norm.slope": np.array([2e-6])}, exact)
    norm = np.linalg.norm(np.concatenate([exact["norm.weight"], exact["norm.bias"]]))
    assert errors["norm.slope"] == pytest.approx(1e-6 / norm)


def test_the_error_of_a_vector_is_relative_to_its_norm(exact) -> None:
    errors = compute_relative_errors({"norm.weight": 1.5 * exact["norm.weight"]}, exact)
    assert errors["norm.weight"] == pytest.approx(0.5)
