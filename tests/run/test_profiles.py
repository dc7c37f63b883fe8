"""Recorded steps of whole runs: files, report, layouts, resume and failures."""

import json

import pytest

SUFFIXES = (".json.gz", "_account.json", "_modules.csv", "_operators.csv")


def list_files(runner, name: str) -> list[str]:
    return sorted(path.name for path in (runner.folder / f"runs/{name}/profiles").iterdir())


def list_events(runner, name: str) -> list[tuple[str, int, list[int]]]:
    rows = runner.rows(name, "events.jsonl")
    return [
        (row["event"], row["step"], row.get("ranks"))
        for row in rows
        if row["event"].startswith("profile")
    ]


def read_account(runner, name: str, prefix: str) -> dict[str, float]:
    """Return the seconds of the classes, which add up to the duration of the step."""
    path = runner.folder / f"runs/{name}/profiles/{prefix}_account.json"
    account = json.loads(path.read_text())
    assert sum(account["classes"].values()) == pytest.approx(account["seconds"], rel=1e-6)
    return account["classes"]


def test_recorded_steps_change_no_result_and_are_not_repeated(runner, uninterrupted) -> None:
    done = runner.run("run.name=x", "run.steps=10", "profiler.steps=[3,8]")
    assert done.returncode == 0, done.stderr
    expected = [f"step_{step}_rank_0{suffix}" for step in (3, 8) for suffix in SUFFIXES]
    assert list_files(runner, "x") == expected
    times = {
        path: path.stat().st_mtime_ns for path in (runner.folder / "runs/x/profiles").iterdir()
    }
    done = runner.run("run.name=x", "run.steps=20", "profiler.steps=[3,8,15]")
    assert done.returncode == 0, done.stderr
    assert list_events(runner, "x") == [("profile", step, [0]) for step in (3, 8, 15)]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert runner.losses("x") == uninterrupted.losses("whole")
    assert runner.weights("x", 20) == uninterrupted.weights("whole", 20)
    account = read_account(runner, "x", "step_15_rank_0")
    assert account["matmuls"] > 0
    page = (runner.folder / "runs/x/report.html").read_text()
    assert '<a href="profiles/step_15_rank_0.json.gz">' in page


def test_a_full_disk_does_not_end_the_run(runner, uninterrupted) -> None:
    (runner.folder / "runs/x").mkdir(parents=True)
    (runner.folder / "runs/x/profiles").write_text("no directory")
    done = runner.run("run.name=x", "profiler.steps=[3]")
    assert done.returncode == 0, done.stderr
    assert "WARNING: step 3 of rank 0 could not be profiled:" in done.stdout + done.stderr
    assert list_events(runner, "x") == [("profile_failed", 3, None)]
    assert runner.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow  # each takes 15 s; the account of communication is in tests/unit/engine
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("layout", "classes"),
    [
        (["parallelism.tp=2"], ["communication"]),
        (["parallelism.pp=2", "batch.micro_batch_size=2"], ["communication"]),
        (["parallelism.dp=2", "parallelism.zero=1"], ["communication", "gradient_reduction"]),
        (
            ["parallelism.dp=2", "parallelism.zero=3", "precision=mixed"],
            ["communication", "gradient_reduction"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_ranks_of_a_layout_record_their_communication(runner, layout, classes) -> None:
    settings = ("profiler.steps=[3]", "profiler.ranks=[0,1]", "recovery.step_timeout_s=60")
    done = runner.run_process("run.name=x", "run.steps=4", *layout, *settings)
    assert done.returncode == 0, done.stderr
    assert list_events(runner, "x") == [("profile", 3, [0, 1])]
    for rank in (0, 1):
        account = read_account(runner, "x", f"step_3_rank_{rank}")
        assert all(account[name] > 0 for name in classes), account


def test_a_run_with_profiles_is_no_copy_of_another_run(runner) -> None:
    assert runner.run("run.name=x", "run.steps=3").returncode == 0
    done = runner.run("run.name=y", "run.steps=3", "profiler.steps=[2]")
    assert done.returncode == 0, done.stderr
    assert list_files(runner, "y") == [f"step_2_rank_0{suffix}" for suffix in SUFFIXES]
