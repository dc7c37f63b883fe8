"""Best learning rate and batch over compute: known exponents, missing optima, and points of others."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hlat.report.fit import main
from hlat.study.hyperparameter_law import fit_hyperparameter_laws, select_best_points
from hlat.study.scaling_fit import FitSettings
from hlat.study.scaling_points import ScalingPoints
from tests.unit.study.scaling_data import compute_losses

RATE, BATCH = (0.3118, -0.1250), (0.2920, 0.3271)
"""Constants of DeepSeek LLM (arXiv 2401.02954, equation 1) of learning rate and batch in tokens."""
SIZES = np.geomspace(1e8, 3e9, 6)
SETTINGS = FitSettings(num_samples=200)


def build_grid(rates=7, batches=1, noise=0.0, seeds=1, num_sizes=6, shift=0.0, seed=0):
    """Return points of a grid of rates and batches around the optima; C = 6 N D with D = 20 N.

    `shift` moves the grid of the rates by octaves from the optimum.
    """
    generator, rows = np.random.default_rng(seed), []
    for size in SIZES[:num_sizes]:
        flops = 6 * size * 20 * size
        best_rate, best_batch = (a * flops**b for a, b in (RATE, BATCH))
        base = float(compute_losses(np.array([[size], [20 * size]]))[0])
        center = 2.0 ** np.round(np.log2(best_rate) + shift)
        middle = 2.0 ** np.round(np.log2(best_batch))
        for rate in center * 2.0 ** (np.arange(rates) - rates // 2):
            for batch in middle * 2.0 ** (np.arange(batches) - batches // 2):
                excess = 0.02 * np.log2(rate / best_rate) ** 2
                excess += 0.01 * np.log2(batch / best_batch) ** 2 * (batches > 1)
                for _ in range(seeds):
                    loss = base + excess + generator.normal(0, noise)
                    rows.append((size, 20 * size, flops, loss, rate, batch))
    table = np.array(rows)[generator.permutation(len(rows))].T
    return ScalingPoints(
        source="grid",
        metric="loss",
        names=[f"p{i}" for i in range(len(rows))],
        parameters=table[0],
        tokens=table[1],
        flops=table[2],
        losses=table[3],
        groups=[str(i) for i in range(len(rows))],
        learning_rates=table[4],
        batch_tokens=table[5],
    )


def test_exponent_of_the_learning_rate_is_exact_without_errors():
    (law,) = fit_hyperparameter_laws(build_grid(), SETTINGS)
    assert law.name == "learning rate"
    assert law.constants["a"].value == pytest.approx(RATE[0], rel=1e-9)
    assert law.constants["b"].value == pytest.approx(RATE[1], rel=1e-9)
    for group in law.groups:
        assert group.optimum.rate == pytest.approx(RATE[0] * group.flops ** RATE[1], rel=1e-9)
    assert law.predict(1e22).value == pytest.approx(RATE[0] * 1e22 ** RATE[1], rel=1e-9)
    assert law.warnings == []


def test_learning_rate_and_batch_of_one_grid():
    rate, batch = fit_hyperparameter_laws(build_grid(5, 5), SETTINGS)
    assert (rate.name, batch.name) == ("learning rate", "batch in tokens")
    assert rate.constants["b"].value == pytest.approx(RATE[1], rel=1e-9)
    assert batch.constants["a"].value == pytest.approx(BATCH[0], rel=1e-7)
    assert batch.constants["b"].value == pytest.approx(BATCH[1], rel=1e-9)


def test_intervals_contain_the_constants_in_most_studies():
    inside = []
    for seed in range(20):
        points = build_grid(noise=0.004, seeds=2, seed=seed)
        (law,) = fit_hyperparameter_laws(points, SETTINGS)
        exponent = law.constants["b"]
        inside.append(exponent.low <= RATE[1] <= exponent.high)
        assert exponent.high - exponent.low < 0.1
    assert sum(inside) >= 14  # a bootstrap of six groups is somewhat narrow


def test_lengths_in_whole_steps_are_of_one_group():
    """The tokens of a run are a multiple of those of its steps, here of fifty."""
    points = build_grid(5, 3)
    unit = 50 * points.batch_tokens
    points.tokens[:] = np.round(points.tokens / unit) * unit
    assert len(np.unique(points.tokens)) > 6
    laws = fit_hyperparameter_laws(points, SETTINGS)
    assert [len(law.groups) for law in laws] == [6, 6]


def test_optimum_at_an_edge_is_no_optimum():
    (law,) = fit_hyperparameter_laws(build_grid(shift=4.0), SETTINGS)
    assert law.constants == {}
    assert "0 of 6 groups of equal size and length have an optimum" in law.reason
    assert {group.reason for group in law.groups} == {
        "the smallest value is the best; add smaller ones"
    }


def test_two_groups_are_no_law_and_three_have_a_warning():
    (two,) = fit_hyperparameter_laws(build_grid(num_sizes=2), SETTINGS)
    assert "2 of 2 groups" in two.reason
    (three,) = fit_hyperparameter_laws(build_grid(num_sizes=3), SETTINGS)
    assert three.constants["b"].value == pytest.approx(RATE[1], rel=1e-9)
    assert three.warnings == [
        "the law of the learning rate has 3 groups; intervals of fewer than 5 are too narrow"
    ]


def test_two_values_are_no_optimum():
    (law,) = fit_hyperparameter_laws(build_grid(rates=2), SETTINGS)
    assert {group.reason for group in law.groups} == {"fewer than three values"}


def test_one_rate_per_group_has_no_law():
    assert fit_hyperparameter_laws(build_grid(rates=1), SETTINGS) == []


def test_law_of_the_loss_has_the_best_points_of_each_group():
    points = build_grid(seeds=3)
    best = select_best_points(points)
    assert len(best) == 18
    octaves = np.log2(best.learning_rates / (RATE[0] * best.flops ** RATE[1]))
    assert np.abs(octaves).max() <= 0.5
    assert select_best_points(best) is best


def build_table(tmp_path: Path) -> Path:
    """Write a grid whose lengths are 10, 20 and 40 tokens per parameter."""
    points, file, rows = build_grid(5), tmp_path / "punkte 点.csv", []
    for ratio in (0.5, 1.0, 2.0):
        tokens = points.tokens * ratio
        law = compute_losses(np.stack([points.parameters, tokens]))
        best = RATE[0] * (6 * points.parameters * tokens) ** RATE[1]
        losses = law + 0.02 * np.log2(points.learning_rates / best) ** 2
        rows += np.stack([points.parameters, tokens, losses, points.learning_rates]).T.tolist()
    with open(file, "w", newline="") as stream:
        csv.writer(stream).writerows([["Größe", "tokens", "loss", "学习率"], *rows])
    return file


def test_tables_files_and_budgets(tmp_path: Path, capsys) -> None:
    file = build_table(tmp_path)
    words = [
        f"data={file}",
        "parameters=Größe",
        "learning_rate=学习率",
        "samples=20",
        "compute=1e22",
    ]
    assert main([*words, f"output={tmp_path}/fit"]) == 0
    text = capsys.readouterr().out
    assert "omitted 72 points with another learning rate or batch than the best" in text
    assert "best learning rate = a C^b, 18 of 18 groups" in text
    best = RATE[0] * 1e22 ** RATE[1]
    assert f"best learning rate: {best:.3g} " in text
    assert "learning_rate as SVG, PNG and CSV" in text
    rows = [*csv.DictReader((tmp_path / "fit/learning_rate.csv").read_text().splitlines())]
    assert len(rows) == 90
    assert float(rows[0]["best"]) == pytest.approx(
        RATE[0] * float(rows[0]["flops"]) ** RATE[1], rel=1e-6
    )
    assert "<svg" in (tmp_path / "fit/learning_rate.svg").read_text()
    assert main([*words, "json=true"]) == 0
    (law,) = json.loads(capsys.readouterr().out)["hyperparameters"]
    assert law["constants"]["b"]["value"] == pytest.approx(RATE[1], rel=1e-6)
    assert law["optima"][0]["value"]["value"] == pytest.approx(best, rel=1e-6)
    assert law["warning"] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learning_rate=Rate"], "has no column Rate; name it with learning_rate=COLUMN"),
        (["batch=B"], "has no column B; name it with batch=COLUMN"),
    ],
)
def test_missing_column_is_one_sentence(tmp_path: Path, capsys, words, message) -> None:
    assert main([f"data={build_table(tmp_path)}", "parameters=Größe", *words]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_column_of_runs_is_an_error(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path), "learning_rate=optimizer.lr"]) == 2
    assert (
        "name columns of data=FILE.csv; those of runs are optimizer.lr" in capsys.readouterr().err
    )
