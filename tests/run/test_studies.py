"""Every study trains: two steps of its first and last point, with a small model."""

import itertools
import json
import signal
import time

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hlat.config.package_dirs import find_package_dir

GRIDS = sorted(
    file.stem
    for file in find_package_dir("sweeps").glob("*.yaml")
    if file.stem not in ("search", "mixture_proposal")
)
RELATIVE = ("ladder", "isoflop", "tokens_per_parameter")
"""Studies whose lengths are replaced by the steps of the small runs."""
LENGTHS = ("schedule.tokens_per_parameter", "schedule.training_flops", "schedule.warmup_fraction")
DEFAULT = {"parallelism", "precision", "upsampling"}


def corners(study):
    """Return the overrides of the first and the last point; layouts of one process only."""
    axes = OmegaConf.load(find_package_dir("sweeps") / f"{study}.yaml").hydra.sweeper.params
    if study == "parallelism":
        return [["parallelism.tp=1", "parallelism.pp=1"]]
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in axes.items()])
    values = [
        axis.sweep_string_iterator() if axis.is_sweep_override() else [axis.value()]
        for axis in parsed
    ]
    points = [*itertools.product(*values)]
    return [[f"{k}={v}" for k, v in zip(axes, points[at], strict=True)] for at in (0, -1)]


@pytest.mark.parametrize("corner", [-1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "study",
    [pytest.param(study, marks=[] if study in DEFAULT else [pytest.mark.slow]) for study in GRIDS],
)
@pytest.mark.slow_after(1)
def test_train_a_point_of_a_study(runner, study, corner):
    point = corners(study)[corner]
    if "batch.ramp.start=2" in point:
        point.append("batch.micro_batch_size=2")
    if study in RELATIVE:
        point = [word for word in point if not word.startswith(LENGTHS)]
        point += [f"{key}=null" for key in LENGTHS]
        point += ["model.num_attention_heads=4", "model.num_key_value_heads=4"]
    done = runner.run(f"+sweep={study}", *point, "run.steps=2", "run.name=x")
    assert done.returncode == 0, done.stderr
    assert len(runner.losses("x")) == 2


@pytest.mark.slow  # one or more whole processes
def test_read_other_text_in_the_second_phase(runner):
    """Compare runs that differ in the second phase: losses are equal until its first step."""
    steps = ["run.steps=8", "batch.global_batch_size=8", "batch.sequence_length=64"]
    short = ["phase.timeline.0.tokens=2048"]
    for name, arguments in {"base": [], "upsampled": short}.items():
        done = runner.run(
            "+sweep=upsampling",
            "run.seed=1",
            f"phase={name}",
            f"run.name={name}",
            *steps,
            *arguments,
        )
        assert done.returncode == 0, done.stderr
    one, two = runner.losses("base"), runner.losses("upsampled")
    assert one[:4] == two[:4]
    assert all(a != b for a, b in zip(one[4:], two[4:], strict=True))
    told = [row for row in runner.rows("upsampled", "events.jsonl") if row["event"] == "phase"]
    assert [(row["step"], row["name"]) for row in told] == [(4, "upsampled")]


@pytest.mark.slow  # eight whole runs, one after the other
def test_stop_a_worse_point_of_a_sweep_that_was_interrupted(runner, capfd):
    """Repeat the command: it does not repeat finished runs, and omits the worse point."""
    arguments = (
        *("-m", "run.name='x-${optimizer.lr}-${run.seed}'", "hydra.sweep.dir=runs/sweeps/s"),
        *("optimizer.lr=1e-2,1e-7", "run.seed=1,2,3,4,5", "+study.baseline={optimizer.lr: 1e-2}"),
        *("study.metric=final_loss", "study.stop_worse=true"),
    )
    sweep = runner.start(*arguments)
    while sweep.poll() is None and not runner.rows("x-0.01-2", "metrics.jsonl"):
        time.sleep(0.02)
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate()
    assert sweep.returncode == 75, err
    assert "were not started" in err
    capfd.readouterr()

    done = runner.run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": not trained, ") == 2
    runs = {path.name for path in (runner.folder / "runs").glob("x-*")}
    expected = {f"x-0.01-{seed}" for seed in range(1, 6)} | {
        f"x-1e-07-{seed}" for seed in (1, 2, 3)
    }
    assert runs == expected
    for name in expected:
        steps = [step for step, _ in runner.losses(name)]
        assert sorted(set(steps)) == [*range(1, 21)]
        assert len(steps) == 20 or name == "x-0.01-2", "no finished run is trained again"
    rows = map(json.loads, (runner.folder / "runs/sweeps/s/sweep.jsonl").read_text().splitlines())
    stopped = [row for row in rows if "stopped" in row]
    assert [row["overrides"][-4] for row in stopped] == ["run.seed=4", "run.seed=5"]

    assert (runner.folder / "runs/sweeps/s/comparison/effects.svg").exists()
    shown = capfd.readouterr().out
    assert "3 of 3, stopped; 5 planned" in shown
    assert "\noptimizer.lr=1e-7 is worse than optimizer.lr=0.01 (difference +" in shown
    assert "not trained, because they are worse than the baseline:\n" in shown
