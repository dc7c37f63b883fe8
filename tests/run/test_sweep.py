"""A multirun starts one process per point, each with a run folder of its own, and ends with the worst code."""


def test_every_point_has_its_run(runner):
    done = runner.run_process("-m", "run.steps=1", "optimizer.beta2=0.95,0.99")
    assert done.returncode == 0, done.stderr
    folders = [path for path in (runner.folder / "runs").iterdir() if path.name != "sweeps"]
    assert len(folders) == 2
    assert all((folder / "report.html").exists() for folder in folders)


def test_a_point_that_is_refused_does_not_stop_the_others(runner):
    done = runner.run_process("-m", "run.steps=1", "precision=mixed,fp32")
    assert done.returncode == 2
    assert "precision.name=mixed" in done.stderr
    assert "1 of 2 points failed" in done.stderr
    folders = [path for path in (runner.folder / "runs").iterdir() if path.name != "sweeps"]
    assert len(folders) == 1
