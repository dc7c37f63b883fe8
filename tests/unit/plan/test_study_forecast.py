"""`hlat plan +sweep=NAME`: runs, cost, and what the seeds detect."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.config.sweep_axes import is_sweep, load_sweep_axes
from hlat.plan.__main__ import main
from hlat.plan.study_forecast import forecast_study, format_forecast
from hlat.study.earlier_runs import summarize_earlier_runs
from hlat.study.power import compute_detectable_difference
from hlat.tracking.text_format import format_short


def test_axes_are_those_of_study_and_command_line() -> None:
    words = ["+sweep=beta2_normuon", "optimizer.normuon.beta2=0.9,0.95", "run.seed=range(1,6)"]
    swept = load_sweep_axes(words)
    assert swept.axes == {
        "run.seed": ["1", "2", "3", "4", "5"],
        "precision": ["bf16_sr", "fp32"],
        "optimizer.normuon.beta2": ["0.9", "0.95"],
    }
    assert swept.overrides == ["+sweep=beta2_normuon"]
    assert len(swept.list_points()) == 20
    assert is_sweep(["optimizer.lr=1,2"])
    assert not is_sweep(["optimizer.lr=1", "data.sources.x.paths=[a,b]"])


@pytest.fixture
def write_runs(tmp_path: Path, compose: Callable[..., object]) -> Callable[..., Config]:
    """Return a function that writes runs of two points of the default size, and of another."""

    def write(hardware: str = "cpu") -> Config:
        config = resolve_config(compose("run.steps=5"))
        values = {"a": [2.0, 2.1, 2.3], "b": [2.1, 2.15, 2.45], "other": [1.0, 5.0, 9.0]}
        for name, bits in values.items():
            for seed, value in enumerate(bits):
                layers = 99 if name == "other" else config.model.num_layers
                settings = {
                    "run": {"seed": seed},
                    "optimizer": {"lr": name},
                    "hardware": {"name": hardware},
                    "model": {"num_layers": layers},
                }
                run_dir = tmp_path / f"runs/{name}{seed}"
                run_dir.mkdir(parents=True)
                tokens = 5 * config.batch.tokens_per_step
                row = {"step": 5, "tokens": tokens, "loss": 1.0, "time": 1.0}
                evaluation = {"event": "evaluate", "step": 5, "time": 1.0, "attempt": 1}
                events = [
                    evaluation | {"bits_per_byte": {"mean": value}},
                    {"event": "finish", "step": 5, "time": 1.0, "attempt": 1},
                ]
                lines = "".join(json.dumps(event) + "\n" for event in events)
                (run_dir / "config.yaml").write_text(json.dumps(settings))
                speed = {"tokens_per_second": 25.0 if name == "other" else 50.0}
                (run_dir / "metrics.jsonl").write_text(json.dumps(row | speed) + "\n")
                (run_dir / "events.jsonl").write_text(lines)
        return config

    return write


def test_runs_of_another_length_state_the_speed_but_no_spread(
    tmp_path: Path, write_runs: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run of each size is enough for the time of a ladder."""
    monkeypatch.chdir(tmp_path)
    config = write_runs()
    longer = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=50))
    found = summarize_earlier_runs(longer, "heldout_bits_per_byte")
    assert (found.tokens_per_second, found.num_runs) == (50, 0)
    assert math.isnan(found.spread)


def test_a_plan_states_runs_cost_power_and_budget(
    tmp_path: Path,
    write_runs: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Use the spread and speed of earlier runs of this size."""
    config = write_runs()
    monkeypatch.chdir(tmp_path)
    words = ["run.steps=5", "optimizer.beta2=0.95,0.99", "run.seed=1,2", "study.budget_hours=0.01"]
    words.append("study.spread=9")  # of a study without earlier runs
    assert main(words) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 runs: 2 points with 2 seeds"
    tokens = 4 * 5 * config.batch.tokens_per_step
    assert lines[6].split() == ["tokens", format_short(tokens / 4), format_short(tokens)]
    text = "\n".join(lines)
    assert "speed: 50 tokens per second, median of earlier runs" in text
    hours = tokens / 50 / 3600
    assert f"exceeds the budget: study.budget_hours=0.01: the runs need {hours:.3g}" in text
    spread = math.sqrt(sum((d - 0.1) ** 2 for d in (0.1, 0.05, 0.15)) / 2)
    assert f"spread of a difference over seeds: {spread:.2g}, from 6 earlier runs" in text
    detectable = compute_detectable_difference(spread, 2)
    assert f"2 seeds detect with 80% power: {detectable:.2g}" in text


@pytest.mark.parametrize(
    ("hardware", "name", "layers", "expected"),
    [
        ("cpu", "cpu", "4,99", "speed: 25 to 50 tokens per second, median of earlier runs"),
        (
            "a100_p4d",
            "p4d.24xlarge",
            "4,98",
            "speed: of earlier runs for 1 of 2 sizes, otherwise predicted",
        ),
    ],
)
def test_a_plan_over_sizes_has_the_speed_of_each(
    write_runs: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hardware: str,
    name: str,
    layers: str,
    expected: str,
) -> None:
    write_runs(name)
    monkeypatch.chdir(tmp_path)
    words = ["run.steps=5", f"hardware={hardware}", f"model.num_layers={layers}"]
    assert expected in format_forecast(forecast_study(words))


@pytest.mark.slow  # 10 s: composes 35 configurations
def test_a_baseline_has_the_name_of_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert forecast_study(["+sweep=optimizers"]).num_comparisons == 6


@pytest.mark.slow  # 3 s: composes five configurations
def test_branches_from_other_steps_are_other_points(
    tmp_path: Path, write_runs: Callable[[], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, metric = write_runs(), "heldout_bits_per_byte"
    monkeypatch.chdir(tmp_path)
    assert summarize_earlier_runs(config, metric).num_runs == 6
    start = {"event": "resume", "step": 2, "attempt": 1, "time": 0.0}
    for run_dir in (tmp_path / "runs").glob("a*"):
        branch = shutil.copytree(run_dir, run_dir.with_name(f"branch_{run_dir.name}"))
        events = (branch / "events.jsonl").read_text()
        (branch / "events.jsonl").write_text(f"{json.dumps(start)}\n{events}")
    assert summarize_earlier_runs(config, metric).num_runs == 9


def test_plans_of_a_search_and_of_an_invalid_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forecast = forecast_study(["+sweep=search"])
    assert (len(forecast.costs), forecast.power) == (12, None)
    stated = forecast_study(["run.seed=1,2", "optimizer.beta2=0.9,0.95", "study.spread=9"])
    assert "spread of a difference over seeds: 9, stated in study.spread" in "\n".join(
        format_forecast(stated)
    )
    assert forecast_study(["run.seed=1,2"]).num_comparisons == 0
    with pytest.raises(ConfigError, match=r"\[optimizer.lr=-1\]"):
        forecast_study(["optimizer.lr=1e-3,-1"])


def test_the_spread_of_a_grid_is_that_of_the_best_value_over_the_rates(
    tmp_path: Path, compose: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds differ much at the high rate, which is never the best; one run of it is missing."""
    words = ("run.steps=5", "study.lr_grid.factor=2", "+study.baseline={optimizer.beta2: 0.95}")
    config = resolve_config(compose(*words))
    best = {"0.95": [2.0, 2.1, 2.3, 9.0], "0.99": [2.1, 2.15, 2.45, 1.0]}
    for beta2, bits in best.items():
        for seed, value in enumerate(bits):
            rates = {0.1: value + 0.5, 0.2: value, 0.4: value + 3 + 5 * seed * (beta2 == "0.99")}
            if seed == 3 and beta2 == "0.99":
                del rates[0.4]
            for rate, metric in rates.items():
                run_dir = tmp_path / f"runs/{beta2}_{seed}_{rate}"
                run_dir.mkdir(parents=True)
                optimizer = {"lr": rate, "beta2": float(beta2)}
                settings = {"run": {"seed": seed}, "optimizer": optimizer}
                settings["model"] = {"num_layers": config.model.num_layers}
                tokens = 5 * config.batch.tokens_per_step
                row = {"step": 5, "tokens": tokens, "loss": 1.0, "time": 1.0}
                events = [
                    {"event": "evaluate", "step": 5, "bits_per_byte": {"mean": metric}},
                    {"event": "finish", "step": 5},
                ]
                lines = (json.dumps({"time": 1.0, "attempt": 1} | event) for event in events)
                (run_dir / "config.yaml").write_text(json.dumps(settings))
                (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
                (run_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    found = summarize_earlier_runs(config, "heldout_bits_per_byte")
    expected = math.sqrt(sum((d - 0.1) ** 2 for d in (0.1, 0.05, 0.15)) / 2)
    assert (found.spread, found.num_runs) == (pytest.approx(expected), 6)
