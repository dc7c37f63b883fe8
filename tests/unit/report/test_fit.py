"""`hlat fit`: fits of runs and files, figures, registered predictions and wrong input."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hlat.report.fit import main
from tests.unit.study.scaling_data import build_inputs, compute_losses, sample_losses, write_runs

FEW_SAMPLES = "samples=20"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fit") / "runs"
    write_runs(root)
    return root


@pytest.fixture
def points(tmp_path: Path) -> Path:
    """Return a CSV file of a grid with errors of 0.1%."""
    inputs = build_inputs(6, 6)
    rows = zip(*inputs.tolist(), sample_losses(inputs, 1e-3, 0).tolist(), strict=True)
    file = tmp_path / "points.csv"
    with open(file, "w", newline="") as stream:
        csv.writer(stream).writerows([["Model Size", "tokens", "loss"], *rows])
    return file


def read_rows(file: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(file.read_text().splitlines())]


def fit_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main([*words, FEW_SAMPLES, "json=true"]) == 0
    return json.loads(capsys.readouterr().out)


def test_fit_of_runs_prints_all_tables(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), FEW_SAMPLES, "compute=1e15"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"18 points of {root}, heldout_bits_per_byte\n")
    for part in ("alpha", "N ~ C^a", "with parameters_without_embedding as N: E ", "influence"):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("1e+15")]
    assert len(rows) == 1


def test_constants_of_a_file_are_found(points: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = fit_json([f"data={points}", "parameters=Model Size", "compute=1e22"], capsys)
    constants = summary["law"]["constants"]
    assert constants["alpha"]["value"] == pytest.approx(0.34, abs=0.02)
    (optimum,) = summary["optima"]
    assert optimum["parameters"]["value"] * optimum["tokens"]["value"] == pytest.approx(1e22 / 6)


def test_accuracy_of_the_optimum_follows_from_its_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = build_inputs(6, 6)
    losses = sample_losses(inputs, 1e-3, 0)
    accuracies = 20 + 70 / (1 + np.exp(5 * (losses - 2.4)))
    file = tmp_path / "points.csv"
    rows = zip(*inputs.tolist(), losses.tolist(), accuracies.tolist(), strict=True)
    with open(file, "w", newline="") as stream:
        csv.writer(stream).writerows([["parameters", "tokens", "loss", "piqa"], *rows])
    summary = fit_json([f"data={file}", "accuracy=piqa", "compute=1e22"], capsys)
    (optimum,) = summary["optima"]
    expected = 20 + 70 / (1 + np.exp(5 * (optimum["loss"]["value"] - 2.4)))
    assert optimum["accuracy"]["value"] == pytest.approx(expected, rel=1e-4)
    assert optimum["accuracy"]["low"] < expected < optimum["accuracy"]["high"]


def test_larger_points_are_compared_with_their_predictions(
    points: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = read_rows(points)
    flops = [6 * float(row["Model Size"]) * float(row["tokens"]) for row in rows]
    limit = sorted(flops)[-4] * 1.01
    words = [f"data={points}", "parameters=Model Size", f"max_flops={limit}"]
    output = tmp_path / "fit"
    assert main([*words, "samples=100", f"output={output}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("33 points of ")
    assert "3 of 3 losses are within their 95% intervals" in text
    assert [row["loss"] for row in read_rows(output / "held_out.csv")] == [
        row["loss"] for row, one in zip(rows, flops, strict=True) if one > limit
    ]
    held_out = fit_json(words, capsys)["held_out"]
    assert len(held_out) == 3
    for one in held_out:  # points have errors of 0.1%
        assert one["predicted"]["value"] == pytest.approx(one["loss"], rel=5e-3)


def test_groups_are_resampled_as_a_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = fit_json([str(root), "group=run.seed"], capsys)
    assert "2 groups are resampled" in " ".join(summary["warnings"])


def test_figures_and_their_numbers_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets, ratios = np.array([1e19, 1e20, 1e21, 1e22, 1e23]), np.geomspace(0.3, 3, 5)
    flops = np.repeat(budgets, len(ratios))
    sizes = (np.sqrt(flops / 120)[:, None].reshape(5, 5) * ratios).ravel()
    losses = compute_losses(np.stack([sizes, flops / (6 * sizes)]))
    file, output = tmp_path / "points.csv", tmp_path / "fit"
    rows = zip(sizes.tolist(), flops.tolist(), losses.tolist(), strict=True)
    with open(file, "w", newline="") as stream:
        csv.writer(stream).writerows([["parameters", "flops", "loss"], *rows])
    summary = fit_json([f"data={file}", f"output={output}"], capsys)
    assert [curve["flops"] for curve in summary["isoflop_curves"]] == pytest.approx(budgets)
    assert len(read_rows(output / "isoflop.csv")) == 25
    fitted = read_rows(output / "fit.csv")
    predicted = [float(row["predicted"]) for row in fitted]
    np.testing.assert_allclose(predicted, losses, rtol=1e-6)
    assert (output / "compute.csv").read_text().startswith("flops,loss,low,high\n")
    for name in ("fit", "isoflop", "compute"):
        assert "<svg" in (output / f"{name}.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either roots of runs, such as runs, or data=FILE.csv"),
        (["{root}", "data={points}"], "give either roots of runs"),
        (["data={points}"], "has no column parameters; name it with parameters=COLUMN"),
        (["data={points}", "where=x=1"], "where= and repeated= select runs"),
        (["{root}", "metric=heldout_bits"], "did you mean heldout_bits_per_byte?"),
        (["{root}", "tokens=seen"], "seen is not a column of runs; use parameters,"),
        (["{root}", "where=state=diverge"], "has no finished runs with state=diverge"),
        (["{root}", "accuracy=scores.piqa"], "has no accuracy=scores.piqa; evaluate it, or omit"),
        (["data={points}", "parameters=Model Size", "max_flops=1e40"], "holds out no point"),
        (["data={points}", "parameters=Model Size", "max_flops=1"], "has 0 points, and the law"),
        (["{root}", "compute=-1"], "compute: -1 is not a number above 0"),
        (
            ["{root}", "sample=5"],
            "sample= is not a setting of this command; did you mean samples=?",
        ),
        (["{root}/h64-1-1"], "has 1 points, and the law of parameters and tokens has 5 constants"),
        (["{root}", "predict='x"], "predict='x has unbalanced quotes"),
    ],
)
def test_wrong_input_is_one_sentence(
    root: Path, points: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [word.format(root=root, points=points) for word in words]
    try:
        code = main([*typed, FEW_SAMPLES])
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
