"""Study of recorded runs: points, design, effects and verdicts in table and page."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from hlat.config.study import StudyConfig
from hlat.report import __main__ as report
from hlat.report.study_figures import build_study_figures
from hlat.study.paired_test import PointRuns
from hlat.study.run_comparison import load_run_records
from hlat.study.sequential_test import compute_sequential_p_value
from hlat.study.study_analysis import Verdict
from hlat.study.study_points import StudyPoint
from hlat.study.study_result import StudyResult, build_study_result
from hlat.study.study_tables import build_effect_table, build_point_table
from hlat.tracking import sweep_log

pytestmark = pytest.mark.usefixtures("without_png")

WriteRun = Callable[..., None]
DESIGN = {"question": "Is y better?", "baseline": {"precision": "x"}, "smallest_difference": 0.01}


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return a function that writes a run with a precision, a seed and held-out results."""

    def write(
        name: str,
        precision: str,
        seed: int,
        bits: float,
        end: str = "finish",
        evaluation: dict[str, object] | None = None,
        **study: object,
    ) -> None:
        run_dir = tmp_path / name
        run_dir.mkdir()
        config = {
            "run": {"name": name, "seed": seed, "root": "runs"},
            "precision": {"name": precision, "weights": f"of {precision}"},
            "tracking": {"wandb": {"group": f"of {precision}"}},
            "study": study or DESIGN,
        }
        curve = [bits + 0.5, bits + 0.2, bits + 0.1, bits]
        events = [{"event": "start", "step": 0, "attempt": 1, "time": 1.0, "began": 1.0}]
        for step, value in enumerate(curve):
            values = {"code": 2 * value, "mean": value}
            row = {"event": "evaluate", "step": step, "attempt": 1, "time": 2.0}
            events.append(row | {"bits_per_byte": values})
        events[-1] |= evaluation or {}
        events.append({"event": end, "step": 3, "attempt": 1, "time": 3.0})
        rows = [{"step": s, "tokens": 3 * s, "loss": 6.0 / s, "time": 1.0 + s} for s in (1, 2, 3)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run_dir / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
        (run_dir / "config.yaml").write_text(json.dumps(config))

    return write


def _load(directory: Path) -> StudyResult:
    result = build_study_result(load_run_records([directory]))
    assert result is not None
    return result


@pytest.mark.slow
def test_a_stopped_point_is_reported_with_its_runs(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compute the p-value from the planned seeds, of which the last ones have no run yet."""
    design = DESIGN | {"stop_worse": True}
    sweep_dir = tmp_path / "sweeps/s"
    for seed in range(1, 7):
        for precision in "xy":
            name, words = f"{precision}{seed}", [f"precision={precision}", f"run.seed={seed}"]
            sweep_log.log_point(sweep_dir, 0, tmp_path / name, words, {})
            if precision == "x" and seed < 6:
                write_run(name, "x", seed, 2.0 + seed / 10, **design)
            elif seed < 4:
                write_run(name, "y", seed, 2.5 + seed / 10 + seed / 100, **design)
    sweep_log.log_stopped_point(sweep_dir, ["precision=y", "run.seed=4"], "worse <by> 0.5")
    assert report.main([str(sweep_dir)]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3, stopped; 6 planned" in shown
    assert "\nprecision=y is worse than precision=x (difference +0.5200" in shown
    assert (
        "\nnot trained, because they are worse than the baseline:\n"
        "[precision=y run.seed=4] worse <by> 0.5\n"
    ) in shown
    differences = np.array([0.51, 0.52, 0.53])
    p_value = compute_sequential_p_value(differences, 6)
    assert p_value > 1.5 * compute_sequential_p_value(differences, 5)
    assert f"p {p_value:.2g}" in shown
    page = (sweep_dir / "comparison.html").read_text()
    assert "<li>[precision=y run.seed=4] worse &lt;by&gt; 0.5</li>" in page


def _evaluation(text: str, *bits: float) -> dict[str, object]:
    """Return the fields of an evaluation of documents of 100 bytes with these bits."""
    clusters = {name: {"bits": [*bits], "bytes": [100.0] * len(bits)} for name in ("code", "docs")}
    return {"text": text, "clusters": clusters}


def test_verdicts_contain_the_error_of_the_held_out_text(
    tmp_path: Path, write_run: WriteRun
) -> None:
    for seed in (1, 2, 3):
        write_run(f"x{seed}", "x", seed, 2 + seed / 10, evaluation=_evaluation("t", 150, 200, 250))
        write_run(f"y{seed}", "y", seed, 2.2 + seed / 9, evaluation=_evaluation("t", 151, 202, 247))
    (found,) = _load(tmp_path).comparisons
    # Differences of 1, 2 and -3 bits in 300 bytes, in each of two sources
    expected = math.sqrt(2 * 3 / 2 * (1 + 4 + 9)) / 300 / 2
    assert found.difference.evaluation_error == pytest.approx(expected)
    assert found.verdict is Verdict.worse
    result = _load(tmp_path)
    headers, (row,) = build_effect_table(result.comparisons, result.design)
    assert dict(zip(headers, row, strict=True))["SE of the text"] == f"{expected:.4f}"
    write_run("z1", "x", 4, 2.0, evaluation=_evaluation("other", 150, 250))
    write_run("z2", "y", 4, 2.1, evaluation=_evaluation("t", 150, 200, 251))
    result = _load(tmp_path)
    assert result.comparisons[0].difference.evaluation_error > 5 * expected  # not paired
    assert result.verdicts[0].startswith(
        "WARNING: the runs were evaluated on different held-out text ("
    )
    write_run("z3", "x", 5, 2.0)
    assert "z3: evaluated by an earlier version" in _load(tmp_path).verdicts[0]


def test_points_are_paired_by_seed_and_diverged_runs_are_counted(
    tmp_path: Path, write_run: WriteRun
) -> None:
    for seed in (1, 2, 3):
        write_run(f"x{seed}", "x", seed, 2.0 + seed / 10)
        write_run(f"y{seed}", "y", seed, 1.9 + seed / 10 + seed / 1000)
    write_run("x4", "x", 4, 2.0)
    write_run("y4", "y", 4, 9.0, end="diverge")
    result = _load(tmp_path)
    (found,) = result.comparisons
    assert found.label == "precision=y - precision=x"
    assert found.difference.num_pairs == 3
    assert found.difference.mean == pytest.approx(-0.098)
    assert found.difference.num_diverged == 1
    assert found.verdict is Verdict.undecided
    headers, (first, second) = build_point_table(result)
    assert dict(zip(headers, first, strict=True)) | {"SD over seeds": "", "95% interval": ""} == {
        "Point": "precision=x", "Finished": "4 of 4", "Diverged": "0", "Mean": "2.1500",
        "95% interval": "", "SD over seeds": "", "SD over the last evaluations": first[-1],
    }  # fmt: skip
    assert second[1:3] == ["3 of 4", "1"]
    headers, (row,) = build_effect_table(result.comparisons, result.design)
    assert row[headers.index("Difference")] == "-0.0980"
    assert "diverged with 1 seed, the baseline with 0" in row[-1]


def set_start(run_dir: Path, start: str) -> None:
    path = run_dir / "config.yaml"
    config = json.loads(path.read_text()) | {"checkpoint": {"start_from": start}}
    path.write_text(json.dumps(config))


def test_the_trunk_of_a_seed_is_no_factor(tmp_path: Path, write_run: WriteRun) -> None:
    for seed, precision in itertools.product((1, 2, 3), "xy"):
        name = f"{precision}{seed}"
        write_run(name, precision, seed, 2.0 if precision == "x" else 1.0)
        set_start(tmp_path / name, f"trunk_{seed}")
    result = _load(tmp_path)
    assert [*result.points] == [(("precision.name", "x"),), (("precision.name", "y"),)]
    (comparison,) = result.comparisons
    assert comparison.difference.num_pairs == 3


def test_the_start_is_a_factor_if_it_alone_differs(tmp_path: Path, write_run: WriteRun) -> None:
    for seed, start in itertools.product((1, 2, 3), "ab"):
        name = f"{start}{seed}"
        write_run(name, "x", seed, 2.0 if start == "a" else 1.0)
        set_start(tmp_path / name, start)
    result = _load(tmp_path)
    assert {point[0][0] for point in result.points} == {"checkpoint.start_from"}


def test_a_shared_run_does_not_decide_the_design(tmp_path: Path, write_run: WriteRun) -> None:
    """Use baseline runs of another study, with other factors."""
    for seed in (1, 2):
        write_run(f"a{seed}", "x", seed, 2.0 + seed, baseline={"optimizer.lr": 1}, metric="step")
        write_run(f"b{seed}", "y", seed, 1.0 + seed * 1.01)
    result = _load(tmp_path)
    assert result.design.question == "Is y better?"
    assert result.comparisons[0].baseline == (("precision.name", "x"),)


def test_metric_of_a_source(tmp_path: Path, write_run: WriteRun) -> None:
    design = {"metric": "heldout_bits_per_byte.code", "baseline": {"precision": "y"}}
    for seed in (1, 2):
        write_run(f"x{seed}", "x", seed, 2.0 + seed / 10, **design)
        write_run(f"y{seed}", "y", seed, 1.0 + seed / 10, **design)
    (found,) = _load(tmp_path).comparisons
    assert found.difference.mean == pytest.approx(2.0)


def test_runs_without_seeds_and_design_are_not_a_study(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("a", "x", 1, 2.0, question=None)
    write_run("b", "y", 1, 2.0, question=None)
    assert build_study_result(load_run_records([tmp_path])) is None
    assert build_study_result([]) is None


def test_an_invalid_design_is_ignored(tmp_path: Path, write_run: WriteRun) -> None:
    for seed in (1, 2):
        write_run(f"x{seed}", "x", seed, 2.0, alpha=7)
        write_run(f"y{seed}", "y", seed, 2.0, baseline="${oc.env:HOME}")
    assert _load(tmp_path).design.alpha == 0.05


def test_terminal_and_page_have_the_verdict(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2, 3):
        write_run(f"x{seed}", "x", seed, 2.0 + seed / 10)
        write_run(f"y{seed}", "y", seed, 1.9 + seed / 10 + seed / 1000)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    verdict = "precision=y is better than precision=x (difference -0.0980, interval "
    assert f"answer to: Is y better?\n{verdict}" in out
    page = (tmp_path / "comparison.html").read_text()
    assert verdict in page
    drawn = {file.stem for file in (tmp_path / "comparison").glob("*.svg")}
    assert {"effects", "loss_tokens", "loss_time"} <= drawn
    effects = ElementTree.parse(tmp_path / "comparison/effects.svg").getroot()
    assert "precision=y - precision=x -0.0980" in (effects.get("aria-label") or "")


@pytest.mark.parametrize(("num_factors", "name"), [(2, "heat_map"), (3, "parallel_coordinates")])
def test_figures_of_several_factors(num_factors: int, name: str) -> None:
    points = {}
    for values in itertools.product("12", repeat=num_factors):
        point = tuple((f"f{i}", value) for i, value in enumerate(values))
        outcomes = PointRuns({"1": float("".join(values))})
        points[point] = StudyPoint(outcomes, (), math.nan)
    result = StudyResult(StudyConfig(), points, [])
    (figure,) = build_study_figures(result)
    assert figure.name == name
    assert f"{'2' * num_factors}.0000" in figure.alt_text
    assert "<svg" in figure.svg
