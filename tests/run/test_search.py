"""Searches with real trials: a diverged trial is a result, a configuration error ends the search."""

import json

import pytest

from hlat.report import __main__ as report

SEARCH = ["-m", "hydra/sweeper=search", "hydra.sweep.dir=found", "run.steps=3"]


@pytest.mark.slow  # tests/unit/launchers/test_search_sweeper.py runs trials without training
def test_print_the_best_trial_that_has_not_diverged(runner, without_figures, capfd):
    arguments = [
        *SEARCH,
        "hydra.sweeper.trials=2",
        "optimizer.lr=1e-3,1e30",
        "optimizer.grad_clip=0",
    ]
    done = runner.run(*arguments)
    assert done.returncode == 0, done.stderr
    assert " diverged\n" in done.stdout
    (best,) = [line for line in done.stdout.splitlines() if "best trial" in line]
    assert "[optimizer.lr=0.001]" in best
    capfd.readouterr()
    rows = [*map(json.loads, (runner.folder / "found/sweep.jsonl").read_text().splitlines())]
    assert len({row["run_folder"] for row in rows}) == 2
    assert report.main([str(runner.folder / "found")]) == 0
    table = capfd.readouterr().out
    assert "optimizer.lr" in table
    assert " diverge " in table
    again = runner.run(*arguments)
    assert again.stdout.splitlines() == [best], "no trial runs twice"


@pytest.mark.slow  # 3 s
def test_end_the_search_at_an_invalid_point(runner, refused):
    done = runner.run(*SEARCH, "parallelism.tp=3,5")
    refused(done, "does not divide")
    kubernetes = ("hydra/launcher=kubernetes", "hydra.launcher.image=x", "optimizer.lr=1e-3,2e-3")
    refused(runner.run(*SEARCH, *kubernetes), "does not return the result of a trial")
    asha = ("hydra.sweeper.asha_min_steps=5", "optimizer.lr=1e-3,2e-3")
    refused(runner.run(*SEARCH, *asha), "set it to 0 with hydra/launcher=local")
