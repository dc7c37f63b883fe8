"""Evaluations submitted to Slurm: during the run that they follow, and across a time limit."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")

from tests.conftest import REPOSITORY
from tests.run.conftest import Runner
from tests.run.questions import write
from tests.slurm.conftest import Login

SLEEP_AFTER_FIRST_TASK = """
import os
if os.environ.get("RANK") == "0" and "SLURM_RESTART_COUNT" not in os.environ:
    import time
    from hlat.evaluate import evaluation_results
    save_scores = evaluation_results.save_scores
    def save_and_sleep(*args):
        row = save_scores(*args)
        time.sleep(600)
        return row
    evaluation_results.save_scores = save_and_sleep
"""
"""The first attempt does not start its second task."""


@pytest.fixture
def evaluated(login: Login, tmp_path: Path) -> Login:
    """Return a user with evaluation data and a run with checkpoints of steps 10 and 20."""
    write(tmp_path / "data")
    login.environment["HF_DATASETS_CACHE"] = str(tmp_path / "hugging_face")
    arguments = ("run.name=x", "checkpoint.keep_every_steps=10", "checkpoint.keep_last=1")
    done = Runner(tmp_path, login.small).run(*arguments)
    assert done.returncode == 0, done.stderr
    return login


def evaluate(login: Login, *arguments: str):
    return login.python("hlat.evaluate", "runs/x", "data=data", "hydra/launcher=slurm", *arguments)


def read_job(folder: Path) -> str:
    (receipts,) = (folder / "runs/x/evaluations").glob("*/submissions/1/receipts.jsonl")
    return json.loads(receipts.read_text().splitlines()[-1])["job"]


def read_job_state(login: Login, job: str) -> str:
    return login.cluster.show_job(job)["JobState"]


@pytest.mark.slow  # test_send_evaluation.py submits one, and test_jobs.py runs jobs
def test_evaluate_checkpoints_while_the_run_writes_them(evaluated: Login) -> None:
    """Remove `finish` from the events of the run until the last checkpoint appears."""
    run = evaluated.folder / "runs/x"
    record = run / "events.jsonl"
    events = record.read_text()
    record.write_text("".join(r for r in events.splitlines(True) if '"finish"' not in r))
    last = shutil.move(run / "checkpoints/step_00000020", evaluated.folder)
    arguments = ("tasks=hlat_csp_en", "follow=true")
    done = evaluate(evaluated, *arguments)
    assert done.returncode == 0, done.stderr
    job = read_job(evaluated.folder)
    assert f"job {job} evaluates runs/x/evaluations/hlat_csp_en-" in done.stdout
    assert "log:  hlat jobs logs runs/x/evaluations/" in done.stdout
    again = evaluate(evaluated, *arguments)
    assert again.returncode == 2, again.stdout
    assert f"runs/x: job {job} is " in again.stderr

    def list_scored_steps() -> list[int]:
        return [
            row["step"] for row in evaluated.rows("x", "events.jsonl") if row["event"] == "score"
        ]

    evaluated.cluster.wait_until(600, "step 10 has scores", lambda: list_scored_steps() == [10])
    shutil.move(last, run / "checkpoints")
    with record.open("a") as file:
        file.writelines(r for r in events.splitlines(True) if '"finish"' in r)
    evaluated.cluster.wait_until(
        600, "it is over", lambda: read_job_state(evaluated, job) == "COMPLETED"
    )
    assert list_scored_steps() == [10, 20]
    files = [path.name for path in sorted((run / "evaluations").glob("*.json"))]
    assert files == ["step_00000010.json", "step_00000020.json"]
    (row,) = evaluated.jobs("runs/x/evaluations").splitlines()[1:]
    assert row.split()[:2] == ["x:", next(p.name for p in (run / "evaluations").glob("hlat_*"))]
    assert row.split()[2:4] == [job, "COMPLETED"]
    assert row.split()[4:8] == ["1", "n1", "20", "csp_en"]


@pytest.mark.slow  # test_jobs.py: the time limit of a run
def test_resume_an_evaluation_after_its_time_limit(evaluated: Login) -> None:
    evaluated.inject(SLEEP_AFTER_FIRST_TASK)
    # The signal arrives 60 to 90 seconds after the start
    limit = ("hydra.launcher.time=3", "hydra.launcher.signal_s=90")
    tasks = ("tasks=hlat_csp_en,hlat_csp_fr", "parallelism.tp=2")
    done = evaluate(evaluated, *tasks, *limit)
    assert done.returncode == 0, done.stderr
    job = read_job(evaluated.folder)
    ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    evaluated.cluster.wait_until(600, "it is over", lambda: read_job_state(evaluated, job) in ended)
    (attempts,) = (evaluated.folder / "runs/x/evaluations").glob("*/submissions/1/attempts.jsonl")
    rows = [json.loads(line) for line in attempts.read_text().splitlines()]
    ends = [(row["exit"], row["step"]) for row in rows if row["event"] == "end"]
    log = evaluated.jobs("logs", "runs/x/evaluations")
    # On a loaded machine, an attempt may reach the time limit before the first task has ended
    assert len(ends) > 1
    assert [code for code, _ in ends] == [75] * (len(ends) - 1) + [0], log
    finished = [step for _, step in ends]
    assert finished == sorted(finished), log
    assert finished[-1] == 2, log
    assert log.count("step_00000020: crows_pairs_english") <= 1 + finished.count(0), log
    scores = json.loads((evaluated.folder / "runs/x/evaluations/step_00000020.json").read_text())
    assert {*scores["scores"]} == {"csp_en", "csp_fr"}


@pytest.mark.slow  # tests/run/test_extensions.py evaluates on this machine
def test_evaluate_a_model_of_an_extension(evaluated: Login) -> None:
    """The job loads the copy of its submission, since the file has an error when it starts."""
    file = evaluated.folder / "gated_attention.py"
    shutil.copy(REPOSITORY / "examples" / file.name, file)
    gated = (f"extensions=[{file.name}]", "model.attention.kind=gated")
    done = Runner(evaluated.folder, evaluated.small).run("run.name=gated", "run.steps=2", *gated)
    assert done.returncode == 0, done.stderr
    arguments = ("runs/gated", "tasks=heldout", gated[0])
    done = evaluated.python("hlat.evaluate", *arguments, "hydra/launcher=slurm")
    assert done.returncode == 0, done.stderr
    file.write_text("raise RuntimeError")
    (receipts,) = evaluated.folder.glob("runs/gated/evaluations/*/submissions/1/receipts.jsonl")
    job = json.loads(receipts.read_text().splitlines()[-1])["job"]
    ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    evaluated.cluster.wait_until(600, "it is over", lambda: read_job_state(evaluated, job) in ended)
    assert read_job_state(evaluated, job) == "COMPLETED", evaluated.jobs("logs", "runs/gated")
    scores = json.loads(
        (evaluated.folder / "runs/gated/evaluations/step_00000002.json").read_text()
    )
    assert "heldout" in scores["tasks"]
    assert (receipts.parent / "extensions" / file.name).is_file()
