"""Fits of power laws: published fits, an independent optimizer, and derivatives."""

import csv
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize

from hlat.study import power_law
from hlat.study.power_law import Array, Objective
from hlat.study.scaling_fit import build_interval, compute_exponents, list_constants
from tests.unit.study.scaling_data import CONSTANTS, build_inputs, sample_losses

CHINCHILLA = Path(os.environ.get("CHINCHILLA_POINTS", "/nowhere"))
"""data/svg_extracted_data.csv of epoch-research/analyzing-chinchilla at 9225883: the points of
figure 4 of arXiv 2203.15556, reconstructed by arXiv 2404.10102. The repository has no license, so
that the file is not part of this one."""
SHA256 = "193478df4e90f040016431996c45682659306840ecdadf83cfb9cd5ca0aa1b30"
NUM_DROPPED = 5
needs_chinchilla = pytest.mark.skipif(
    not CHINCHILLA.is_file(), reason="set CHINCHILLA_POINTS to the points of arXiv 2404.10102"
)
PUBLISHED = {
    Objective.huber: {"E": 1.8172, "alpha": 0.34730, "beta": 0.36716, "objective": 1.018274e-3},
    Objective.likelihood: {"E": 1.81686, "alpha": 0.34781, "beta": 0.36585, "objective": -879.7731},
}
"""Output of data_analysis.ipynb of the same repository."""
PUBLISHED_INTERVALS = {
    "E": (1.769, 1.871, 0.05),
    "alpha": (0.317, 0.373, 0.05),
    "beta": (0.331, 0.415, 0.05),
    "A": (285, 744, 0.2),
    "B": (1042, 5810, 0.2),
}
"""95% intervals of the bootstrap of the notebook, and tolerances."""


def load_chinchilla() -> tuple[Array, Array]:
    """Return the inputs [2, 240] and losses without the five highest."""
    content = CHINCHILLA.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    rows = [*csv.DictReader(content.decode().splitlines())]
    names = ("Model Size", "Training FLOP", "loss")
    parameters, flops, losses = np.array([[float(row[name]) for row in rows] for name in names])
    kept = np.argsort(losses)[:-NUM_DROPPED]
    inputs = np.stack([parameters, flops / (6 * parameters)])
    return inputs[:, kept], losses[kept]


@needs_chinchilla
@pytest.mark.parametrize("objective", Objective)
def test_published_fits_of_chinchilla(objective: Objective) -> None:
    fit = power_law.fit_power_law(*load_chinchilla(), objective)
    found = {**list_constants(fit.law), "objective": fit.objective}
    for name, value in PUBLISHED[objective].items():
        assert found[name] == pytest.approx(value, rel=1e-3), name


@needs_chinchilla
@pytest.mark.slow
def test_published_intervals_of_chinchilla() -> None:
    inputs, losses = load_chinchilla()
    fit, problem = power_law.fit_power_law(inputs, losses), power_law.build_problem(inputs, losses)
    names = [str(i) for i in range(len(losses))]
    laws = power_law.bootstrap(problem, fit.minima, names, 4000, 42)
    values, samples = list_constants(fit.law), list_constants(laws)
    for name, (low, high, tolerance) in PUBLISHED_INTERVALS.items():
        interval = build_interval(values[name], samples[name])
        assert interval.low == pytest.approx(low, rel=tolerance), name
        assert interval.high == pytest.approx(high, rel=tolerance), name
    # a = 0.513 with a standard error of 0.020 (arXiv 2404.10102)
    assert float(compute_exponents(fit.law)) == pytest.approx(0.513, abs=0.002)
    assert compute_exponents(laws).std() == pytest.approx(0.020, abs=0.002)


def test_constants_of_exact_losses_are_found() -> None:
    inputs = build_inputs()
    fit = power_law.fit_power_law(inputs, sample_losses(inputs, 0.0, 0))
    for name, value in list_constants(fit.law).items():
        assert float(value) == pytest.approx(CONSTANTS[name], rel=1e-6), name


def test_constants_of_exact_losses_over_compute_are_found() -> None:
    flops = np.geomspace(1e15, 1e20, 8)
    fit = power_law.fit_power_law(flops[None], 1.7 + 400 * flops**-0.16)
    assert float(fit.law.irreducible) == pytest.approx(1.7, rel=1e-6)
    assert fit.law.coefficients[0] == pytest.approx(400, rel=1e-5)
    assert fit.law.exponents[0] == pytest.approx(0.16, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_minimum_is_that_of_least_squares_with_huber_loss(seed: int) -> None:
    """Compare with another algorithm of SciPy, with numeric derivatives of the law."""
    inputs = build_inputs()
    losses = sample_losses(inputs, 0.01, seed)
    fit = power_law.fit_power_law(inputs, losses)

    def compute(constants: Array) -> Array:
        (e, a, b), (alpha, beta) = np.exp(constants[:3]), constants[3:]
        predicted = e + a * (inputs[0] / 1e9) ** -alpha + b * (inputs[1] / 1e11) ** -beta
        return np.asarray(np.log(predicted) - np.log(losses))

    start = [0.5, -1.0, -1.0, 0.3, 0.3]
    tolerances = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-15)
    other = optimize.least_squares(
        compute, start, loss="huber", f_scale=1e-3, x_scale="jac", max_nfev=20000, **tolerances
    )
    assert fit.objective <= other.cost * (1 + 1e-9)
    assert fit.objective == pytest.approx(other.cost, rel=1e-4)


def test_derivatives_are_those_of_finite_differences() -> None:
    inputs = build_inputs()
    problem = power_law.build_problem(inputs, sample_losses(inputs, 0.01, 0), threshold=0.01)
    constants = np.array([0.3, -0.5, -0.4, 0.3, 0.25])

    def compute_gradient(point: Array) -> Array:
        return problem.compute_value_and_gradient(point)[1]

    value = optimize.approx_fprime(constants, lambda x: problem.compute_value_and_gradient(x)[0])
    np.testing.assert_allclose(compute_gradient(constants), value, rtol=1e-5)
    hessian = optimize.approx_fprime(constants, compute_gradient)
    np.testing.assert_allclose(problem.compute_hessian(constants), hessian, rtol=1e-4, atol=1e-2)


def test_likelihood_is_that_of_laplace() -> None:
    """Compare with the density of Laplace, whose scale is the mean absolute residual.

    Below a delta of 1e-3 of the scale, both densities differ by less than 1e-3.
    """
    inputs = build_inputs()
    losses = sample_losses(inputs, 0.01, 1)
    fit = power_law.fit_power_law(inputs, losses, Objective.likelihood)
    residuals = np.log(losses) - np.log(fit.law.predict(inputs))
    scale = np.abs(residuals).mean()
    laplace = len(losses) * (1 + np.log(2 * scale))
    assert fit.objective == pytest.approx(laplace, rel=1e-3)
    huber = power_law.fit_power_law(inputs, losses)
    other = np.log(losses) - np.log(huber.law.predict(inputs))
    assert np.abs(residuals).sum() <= np.abs(other).sum()


def test_bootstrap_draws_whole_groups() -> None:
    """With two groups of exact laws, samples of a single group have exactly its law."""
    inputs = np.tile(build_inputs(), 2)
    losses = sample_losses(inputs, 0.0, 0)
    half = len(losses) // 2
    losses[half:] *= 1.1
    problem = power_law.build_problem(inputs, losses)
    fit = power_law.fit_power_law(inputs, losses)
    groups = ["a"] * half + ["b"] * half
    samples = power_law.bootstrap(problem, fit.minima, groups, 20, 0)
    ratios = samples.predict(inputs[:, :1])[:, 0] / losses[0]
    assert np.isclose(ratios, 1, rtol=1e-6).any()
    assert np.isclose(ratios, 1.1, rtol=1e-6).any()


def test_samples_leave_a_term_of_zero() -> None:
    """Start at an E of 2e-9, where its gradient is 0."""
    inputs = build_inputs()
    losses = sample_losses(inputs, 0.0, 0)
    problem = power_law.build_problem(inputs, losses)
    start = power_law.fit_power_law(inputs, losses).minima[0].copy()
    start[0] = -20
    names = [str(i) for i in range(len(losses))]
    samples = power_law.bootstrap(problem, [start], names, 5, 0)
    assert (samples.irreducible > 0.1 * CONSTANTS["E"]).all()
