"""Best learning rates of recorded runs: sentences, page, figures and JSON."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.config.study import StudyConfig
from hlat.report.__main__ import main as report
from hlat.report.study_figures import build_tuning_figures
from hlat.study.run_comparison import load_run_records
from hlat.study.study_result import StudyResult, build_study_result

pytestmark = pytest.mark.usefixtures("without_png")

RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
GRID = {"factor": 2.0, "below": 2, "above": 2}
Write = Callable[..., None]


@pytest.fixture
def write_grid(write_run: Callable[..., Path]) -> Write:
    """Return a function that writes two seeds of a grid whose optimum is at `best`."""

    def write(
        best: float,
        width: int = 64,
        grid: object = GRID,
        diverges_at: float = 1.0,
        seeds: tuple[int, ...] = (1, 2),
        parametrization: str = "standard",
    ) -> None:
        for seed in seeds:
            for rate in RATES:
                write_run(
                    f"{parametrization}_w{width}_s{seed}_lr{rate}",
                    lr=rate,
                    seed=seed,
                    bits=2 + 0.1 * seed + 0.02 * math.log2(rate / best) ** 2,
                    end="diverge" if rate >= diverges_at else "finish",
                    settings={
                        "study": {"question": "Which rate?", "lr_grid": grid},
                        "model": _build_model(width, parametrization),
                    },
                )

    return write


def _build_model(width: int, parametrization: str = "standard") -> dict[str, object]:
    base_width = None if parametrization == "standard" else 64
    return {
        "name": f"width_{width}",
        "hidden_size": width,
        "parametrization": {"name": parametrization, "base_width": base_width},
    }


def _load(tmp_path: Path) -> StudyResult:
    result = build_study_result(load_run_records([tmp_path / "runs"]))
    assert result is not None
    return result


def test_the_optimum_is_stated_with_its_override(tmp_path: Path, write_grid: Write) -> None:
    write_grid(best=0.11)
    assert _load(tmp_path).verdicts == [
        "the best optimizer.lr is 0.11 (95% interval 0.11 to 0.11; 2 seeds); use optimizer.lr=0.11"
    ]


def test_one_seed_has_an_optimum(tmp_path: Path, write_grid: Write) -> None:
    write_grid(best=0.11, seeds=(1,))
    (verdict,) = _load(tmp_path).verdicts
    assert verdict.endswith("; 1 seed); use optimizer.lr=0.11")


def test_an_interval_beyond_the_fitted_rates_has_a_warning(
    tmp_path: Path, write_run: Callable[..., Path]
) -> None:
    study = {"study": {"lr_grid": GRID}}
    for rate, bits in zip(RATES, (2.937, 2.825, 2.774, 2.811, 2.831), strict=True):
        write_run(f"lr{rate}", lr=rate, bits=bits, settings=study)
    (verdict,) = _load(tmp_path).verdicts
    assert "the interval exceeds the fitted rates, so add seeds" in verdict


def test_an_edge_names_the_command_that_extends_it(tmp_path: Path, write_grid: Write) -> None:
    write_grid(best=5.0)
    assert _load(tmp_path).verdicts == [
        "no optimum: the highest rate 0.4 is the best; extend the grid: repeat the command with "
        "study.lr_grid.above=4"
    ]


def test_an_extended_grid_is_extended_from_its_new_edge(
    tmp_path: Path, write_grid: Write, write_run: Callable[..., Path]
) -> None:
    write_grid(best=0.001)
    study = {"lr_grid": GRID | {"below": 4}}
    settings = {"study": study, "model": _build_model(64)}
    write_run("more", lr=0.0125, bits=1.9, settings=settings)
    write_run("more2", lr=0.0125, seed=2, bits=1.9, settings=settings)
    (verdict,) = _load(tmp_path).verdicts
    assert verdict.endswith("repeat the command with study.lr_grid.below=6")


def test_diverged_rates_are_named(tmp_path: Path, write_grid: Write) -> None:
    write_grid(best=0.05, diverges_at=0.4)
    (verdict,) = _load(tmp_path).verdicts
    assert verdict.endswith("use optimizer.lr=0.05; excluded, because runs diverged: 0.4")


def test_the_movement_over_a_size_is_stated(tmp_path: Path, write_grid: Write) -> None:
    grid = GRID | {"transfer_over": "model.hidden_size"}
    write_grid(best=0.2, width=64, grid=grid)
    write_grid(best=0.1, width=128, grid=grid)
    write_grid(best=0.01, width=256, grid=grid)
    result = _load(tmp_path)
    assert result.verdicts[0] == (
        "the best optimizer.lr moves by -3.00 grid steps (95% interval -3.00 to -3.00) when "
        "model.hidden_size grows by a factor of 8; without model.hidden_size=256, which has no "
        "optimum"
    )
    (figure,) = build_tuning_figures(result)
    lines = figure.draw().axes[0].get_lines()
    assert "model.hidden_size=128" in {line.get_label() for line in lines}


def test_the_movement_is_stated_for_each_parametrization(tmp_path: Path, write_grid: Write) -> None:
    grid = GRID | {"transfer_over": "model.hidden_size"}
    for width, best in ((64, 0.2), (128, 0.1)):
        write_grid(best=best, width=width, grid=grid)
        write_grid(best=0.1, width=width, grid=grid, parametrization="mup")
    result = _load(tmp_path)
    assert [line.partition(" grid steps")[0] for line in result.verdicts[:2]] == [
        "model.parametrization=mup: the best optimizer.lr moves by +0.00",
        "model.parametrization=standard: the best optimizer.lr moves by -3.00",
    ]
    assert [len(one.tunings) for one in result.transfers] == [2, 2]


def test_a_study_without_a_grid_has_comparisons(tmp_path: Path, write_grid: Write) -> None:
    write_grid(best=0.1, grid={})
    result = _load(tmp_path)
    assert not result.tunings
    assert len(result.comparisons) == len(RATES) - 1
    assert result.design.lr_grid == StudyConfig().lr_grid


@pytest.mark.slow
def test_report_writes_page_and_json(
    tmp_path: Path, write_grid: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write_grid(best=0.11, diverges_at=0.4)
    assert report([str(tmp_path / "runs")]) == 0
    assert "use optimizer.lr=0.11" in capsys.readouterr().out
    page = (tmp_path / "runs/comparison.html").read_text()
    assert "use optimizer.lr=0.11" in page
    content = json.loads((tmp_path / "runs/best_learning_rates.json").read_text())
    (optimum,) = content["optima"]
    assert optimum["override"] == "optimizer.lr=0.11"
    assert optimum["lr"] == pytest.approx(0.11, rel=1e-5)
    assert content["movements"] == []
