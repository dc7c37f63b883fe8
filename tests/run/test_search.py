"""A search by real trials: one that diverges ends itself only, and a mistake ends all."""

import json

from hlat.report import __main__ as report

SEARCH = ["-m", "hydra/sweeper=search", "hydra.sweep.dir=found", "run.steps=6"]


def test_the_best_of_what_did_not_diverge(runner, capsys):
    words = [*SEARCH, "hydra.sweeper.trials=2", "optimizer.lr=1e-3,1e30", "optimizer.grad_clip=0"]
    done = runner.run_process(*words)
    assert done.returncode == 0, done.stderr
    assert " diverged\n" in done.stdout
    (told,) = [line for line in done.stdout.splitlines() if "best trial" in line]
    assert "[optimizer.lr=0.001]" in told
    rows = [*map(json.loads, (runner.folder / "found/sweep.jsonl").read_text().splitlines())]
    assert len({row["run_folder"] for row in rows}) == 2
    assert report.main([str(runner.folder / "found")]) == 0
    table = capsys.readouterr().out
    assert "optimizer.lr" in table
    assert " diverge\n" in table
    again = runner.run_process(*words)
    assert again.stdout.splitlines() == [told], "there is nothing left to do"


def test_a_point_that_cannot_run_ends_the_search(runner, refused):
    done = runner.run(*SEARCH, "parallelism.tp=3,5")
    refused(done, "does not divide")
    refused(runner.run(*SEARCH, "hydra/launcher=slurm", "optimizer.lr=1e-3,2e-3"), "does not wait")
