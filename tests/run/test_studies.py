"""Every study trains: two steps of its first and last point, of a model small enough for a second."""

import itertools

import pytest
from omegaconf import OmegaConf

from hlat.config.package_dirs import find_package_dir

GRIDS = sorted(
    file.stem for file in find_package_dir("sweeps").glob("*.yaml") if file.stem != "search"
)


def corners(study):
    """The overrides of the first and the last point; layouts of one process only."""
    axes = OmegaConf.load(find_package_dir("sweeps") / f"{study}.yaml").hydra.sweeper.params
    if study == "parallelism":
        return [["parallelism.tp=1", "parallelism.pp=1"]]
    points = [*itertools.product(*(str(values).split(",") for values in axes.values()))]
    return [[f"{k}={v}" for k, v in zip(axes, points[at], strict=True)] for at in (0, -1)]


@pytest.mark.parametrize("study", GRIDS)
def test_a_study_trains(runner, study):
    losses = []
    for point in corners(study):
        done = runner.run(f"+sweep={study}", *point, "run.steps=2", "run.name=x")
        assert done.returncode == 0, done.stderr
        losses.append(runner.losses("x"))
        (runner.folder / "runs/x").rename(runner.folder / f"{len(losses)}")
    assert all(len(found) == 2 for found in losses)


def test_the_second_phase_reads_other_text(runner):
    """Of two runs that differ in the phase only, until its first step none differs."""
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
