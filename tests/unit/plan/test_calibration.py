"""Constants of the planner from measured runs, and the runs that it suggests."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from hlat.config import compose as composition
from hlat.config.config_errors import ConfigError
from hlat.plan import __main__ as plan
from hlat.plan.achieved_speed import get_efficiency
from hlat.plan.calibration import (
    ASSUMED_STEP_ERROR,
    MeasuredRun,
    calibrate,
    compute_prior,
    predict_step,
    suggest_runs,
)
from hlat.plan.calibration_file import CONSTANTS, load_calibration, write_calibration
from hlat.plan.hardware_efficiency import UNKNOWN_HARDWARE, load_efficiencies
from hlat.plan.layout_search import search_layouts

ON_CPU = ("model=tiny", "parallelism.dp=2", "batch.sequence_length=256", "hardware=cpu")
ON_H100 = ("model=7b", "hardware=h100_p5", "precision=bf16")
TRUE_CPU = replace(
    UNKNOWN_HARDWARE,
    compute=0.03,
    eager_passes=12.0,
    operator_s=1.6e-3,
    link=0.65,
    collective_s=1e-2,
)
"""Constants that are slower than the assumed ones by factors of 3 to 5.5."""


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _measure(configs, efficiency):
    """Return runs whose step times are those of given constants."""
    return [
        MeasuredRun(f"run_{i}", one, predict_step(one, efficiency)) for i, one in enumerate(configs)
    ]


def _get_median_error(configs, planned, true):
    errors = [predict_step(one, planned) / predict_step(one, true) - 1 for one in configs]
    return float(np.median(np.abs(errors)))


def test_three_suggested_runs_determine_the_step_times_of_other_layouts(config):
    run = config(*ON_CPU)
    suggested, start = suggest_runs(run, 3)
    layouts = [layout.config for layout in search_layouts(run)]
    assert _get_median_error(layouts, UNKNOWN_HARDWARE, TRUE_CPU) > 0.3
    found = calibrate(_measure([one.layout for one in suggested], TRUE_CPU))
    assert _get_median_error(layouts, found.efficiency, TRUE_CPU) < 0.06
    assert start > 0.5
    assert [one.std for one in suggested] == sorted((one.std for one in suggested), reverse=True)
    for measured, (before, after, _) in zip(found.runs, found.planned_s, strict=True):
        assert abs(after / measured.step_s - 1) < 0.1 < abs(before / measured.step_s - 1)


def test_first_suggested_run_is_the_best_of_all(config):
    """Compare the greedy choice with the posterior covariance for each layout."""
    run = config(*ON_CPU)
    layouts = [layout.config for layout in search_layouts(run) if layout.fits]
    fastest = min(predict_step(one, UNKNOWN_HARDWARE) for one in layouts)
    layouts = [one for one in layouts if predict_step(one, UNKNOWN_HARDWARE) < 3 * fastest]
    groups = list(CONSTANTS)

    def predict_logs(scales):
        fields = {f: s for name, s in zip(groups, scales, strict=True) for f in CONSTANTS[name]}
        scaled = {
            field: getattr(UNKNOWN_HARDWARE, field) * scale
            for field, scale in fields.items()
            if getattr(UNKNOWN_HARDWARE, field) is not None
        }
        constants = replace(UNKNOWN_HARDWARE, **scaled)
        return np.log([predict_step(one, constants) for one in layouts])

    ones, slopes = np.ones(len(groups)), []
    for i in range(len(groups)):
        scales = ones.copy()
        scales[i] = np.exp(1e-3)
        slopes.append((predict_logs(scales) - predict_logs(ones)) / 1e-3)
    rows = np.array(slopes).T
    prior = np.linalg.inv(compute_prior(UNKNOWN_HARDWARE, groups))

    def compute_std(chosen):
        covariance = np.linalg.inv(prior + rows[chosen].T @ rows[chosen] / ASSUMED_STEP_ERROR**2)
        return np.sqrt(np.mean([row @ covariance @ row for row in rows]))

    suggested, start = suggest_runs(run, 2)
    assert start == pytest.approx(compute_std([]), rel=1e-3)
    stds = [compute_std([i]) for i in range(len(layouts))]
    assert suggested[0].std == pytest.approx(min(stds), rel=1e-3)
    pairs = [compute_std(list(pair)) for pair in combinations(range(0, len(layouts), 3), 2)]
    assert suggested[1].std < 1.2 * min(pairs)


def test_published_constants_change_by_what_the_runs_show(config):
    """On a slower network, layouts that do not use it keep their times."""
    h100 = load_efficiencies()["h100"]
    nodes = ("hardware.nodes=4", "batch.global_batch_size=256")
    layouts = [
        config(*ON_H100, *nodes, "parallelism=fsdp"),
        config(*ON_H100, *nodes, "batch.micro_batch_size=2"),
        config(*ON_H100, *nodes, "batch.micro_batch_size=8"),
    ]
    slower = replace(h100, network=0.7 * h100.network)
    found = calibrate(_measure(layouts, slower))
    assert 0.6 < found.factors["network"] < 0.95 < found.factors["matmuls"] < 1.05
    times = np.array([run.step_s for run in found.runs])
    before, after, _ = (
        np.abs(np.log(planned / times)).max() for planned in zip(*found.planned_s, strict=True)
    )
    assert after < 0.6 * before
    unchanged = calibrate(_measure(layouts, h100))
    assert unchanged.efficiency.compute == pytest.approx(h100.compute, rel=1e-6)
    low, high = unchanged.efficiency.interval
    assert low == pytest.approx(1 / high)
    assert 1.05 < high < 1.1  # STEP_ERROR, with Student's t of three runs


def test_interval_contains_the_errors_of_runs_that_the_fit_lacks(config):
    layouts = [config(*ON_CPU, f"batch.micro_batch_size={size}") for size in (1, 2, 4)]
    exact = _measure(layouts, TRUE_CPU)
    noisy = [replace(run, step_s=run.step_s * s) for run, s in zip(exact, (1, 1.6, 1), strict=True)]
    assert calibrate(noisy).efficiency.interval[1] > 1.5 > calibrate(exact).efficiency.interval[1]


def test_file_selects_the_constants(config, tmp_path):
    run = config(*ON_CPU)
    found = calibrate(_measure([run], TRUE_CPU))
    file = tmp_path / "new" / "cluster.yaml"
    write_calibration(file, run, found.efficiency)
    loaded = load_calibration(file, run)
    assert predict_step(run, loaded) == pytest.approx(predict_step(run, found.efficiency), rel=1e-3)
    assert loaded.source == found.efficiency.source
    assert loaded.interval == pytest.approx(found.efficiency.interval, rel=1e-3)
    planned = config(*ON_CPU, f"hardware.calibration={file}")
    assert get_efficiency(planned) == loaded
    with pytest.raises(ConfigError, match="hardware=cpu has no constants"):
        get_efficiency(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": "p5.48xlarge"}, "is for hardware.name=p5.48xlarge, not cpu"),
        ({"device": "h100"}, "is for hardware.device=h100, not null"),
        ({"dtype": "bf16"}, "is for precision.compute_dtype=bf16, not fp32"),
        ({"constants": {"compute": -1}}, "has compute=-1, which is not a number above 0"),
        ({"constants": {"compute": True}}, "has compute=true, which is not a number above 0"),
        ({"constants": {"speed": 1}}, "has constants other than compute"),
        ({"constants": [1]}, "has constants other than compute"),
        ({"interval": [0.9]}, "has an interval that is not two numbers"),
        ({"interval": ["low", 1.1]}, "has interval=low"),
        ({"more": 1}, "is no file of hlat plan calibrate"),
    ],
)
def test_invalid_file_is_refused(config, tmp_path, changes, message):
    run = config(*ON_CPU)
    file = tmp_path / "cluster.yaml"
    write_calibration(file, run, TRUE_CPU)
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(content | changes))
    with pytest.raises(ConfigError, match=message):
        load_calibration(file, run)


def test_missing_file_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_calibration(tmp_path / "cluster.yaml", config(*ON_CPU))


def test_runs_of_different_hardware_are_refused(config):
    runs = _measure([config(*ON_CPU)], TRUE_CPU)
    runs += _measure([config(*ON_H100)], load_efficiencies()["h100"])
    with pytest.raises(ConfigError, match=r"hardware.name=cpu and run_0 p5.48xlarge; calibrate"):
        calibrate(runs)


def _write_run(directory, seconds, *overrides):
    """Write the files of a run that the calibration reads."""
    directory.mkdir()
    tree = composition.compose_config([*ON_CPU, *overrides])
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(tree, resolve=True))
    rows = [{"step": i + 1, "step_seconds": value} for i, value in enumerate(seconds)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_command_calibrates_runs_and_plans_with_the_file(config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, size in enumerate((1, 2, 4)):
        layout = f"batch.micro_batch_size={size}"
        run = config(*ON_CPU, layout)
        step_s = predict_step(run, TRUE_CPU)
        _write_run(tmp_path / f"run_{i}", [9.0] * 3 + [step_s] * 9, layout)
    assert plan.main(["calibrate", "run_0", "run_1", "run_2", "output=cluster.yaml"]) == 0
    output = capsys.readouterr().out
    assert "3 runs on cpu; constants before: assumed" in output
    assert "wrote cluster.yaml; plan with hardware.calibration=cluster.yaml" in output
    assert plan.main([*ON_CPU, "hardware.calibration=cluster.yaml", "json=true"]) == 0
    planned = json.loads(capsys.readouterr().out)
    exact = predict_step(run, TRUE_CPU)
    assert planned["throughput"]["step"]["total"] == pytest.approx(exact, rel=0.05)
    assert plan.main([*ON_CPU, "hardware.calibration=cluster.yaml"]) == 0
    assert "constants of cluster.yaml: 3 measured runs, calibrated on 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate"], "calibrate needs directories of runs"),
        (["calibrate", "missing"], "missing is not the directory of a run"),
        (["calibrate", "short"], "short has 2 logged steps after the first 3, fewer than 5"),
        (["calibrate", "growing"], "growing has a batch that grows"),
        (["calibrate", "suggest=true", "output=a.yaml"], "output= is for the constants"),
        (["calibrate", "suggest=true", "optimizer.lrr=1"], "optimizer.lr"),
        (["calibrat", "run"], "did you mean calibrate"),
    ],
)
def test_command_refuses_bad_input(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    _write_run(tmp_path / "short", [1.0] * 5)
    _write_run(tmp_path / "growing", [1.0] * 12, "batch.ramp.start=2", "batch.ramp.tokens=10000")
    assert plan.main(words) == 2
    assert message in capsys.readouterr().err


def test_suggested_commands_contain_the_layouts(capsys):
    assert plan.main(["calibrate", "suggest=true", *ON_CPU]) == 0
    output = capsys.readouterr().out
    commands = [line for line in output.splitlines() if line.startswith("  hlat train ")]
    assert len(commands) == 3
    for i, line in enumerate(commands):
        words = line.split()[2:]
        keys = [word.partition("=")[0] for word in words]
        assert len(keys) == len(set(keys))
        assert f"run.name=calibrate_{i + 1}" in words
        assert {"model=tiny", "run.steps=20"} <= set(words)
    assert "hlat plan calibrate runs/calibrate_1 runs/calibrate_2 runs/calibrate_3" in output
