"""Every study trains: two steps of its first and last point, with a small model."""

import itertools

import pytest
from omegaconf import OmegaConf

from hlat.config.package_dirs import find_package_dir

GRIDS = sorted(
    file.stem for file in find_package_dir("sweeps").glob("*.yaml") if file.stem != "search"
)
DEFAULT = {"parallelism", "precision", "upsampling"}


def corners(study):
    """Return the overrides of the first and the last point; layouts of one process only."""
    axes = OmegaConf.load(find_package_dir("sweeps") / f"{study}.yaml").hydra.sweeper.params
    if study == "parallelism":
        return [["parallelism.tp=1", "parallelism.pp=1"]]
    points = [*itertools.product(*(str(values).split(",") for values in axes.values()))]
    return [[f"{k}={v}" for k, v in zip(axes, points[at], strict=True)] for at in (0, -1)]


@pytest.mark.parametrize("corner", [-1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "study",
    [pytest.param(study, marks=[] if study in DEFAULT else [pytest.mark.slow]) for study in GRIDS],
)
def test_train_a_point_of_a_study(runner, study, corner):
    point = corners(study)[corner]
    done = runner.run(f"+sweep={study}", *point, "run.steps=2", "run.name=x")
    assert done.returncode == 0, done.stderr
    assert len(runner.losses("x")) == 2


@pytest.mark.slow  # one or more whole processes
def test_read_other_text_in_the_second_phase(runner):
    """Two runs that differ in the phase only have the same losses until its first step."""
    steps = ["run.steps=8", "batch.global_batch_size=8", "batch.sequence_length=64"]
    short = ["phase.timeline.0.tokens=2048"]
    for name, words in {"base": [], "upsampled": short}.items():
        done = runner.run(
            "+sweep=upsampling", "run.seed=1", f"phase={name}", f"run.name={name}", *steps, *words
        )
        assert done.returncode == 0, done.stderr
    one, two = runner.losses("base"), runner.losses("upsampled")
    assert one[:4] == two[:4]
    assert all(a != b for a, b in zip(one[4:], two[4:], strict=True))
    told = [row for row in runner.rows("upsampled", "events.jsonl") if row["event"] == "phase"]
    assert [(row["step"], row["name"]) for row in told] == [(4, "upsampled")]
