"""Evaluations sent to Slurm: beside the run that they follow, and over a limit of their time."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")

from tests.run.questions import write
from tests.slurm.conftest import Login

SET_ASIDE_AFTER_A_TASK = """
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
"""The first attempt never comes to its second task."""


@pytest.fixture
def asking(login: Login, tmp_path: Path) -> Login:
    """A user with questions and a run whose steps 10 and 20 are kept."""
    write(tmp_path / "data")
    login.environment["HF_DATASETS_CACHE"] = str(tmp_path / "hugging_face")
    words = ("run.name=x", "checkpoint.keep_every_steps=10", "checkpoint.keep_last=1")
    done = login.python("hlat.train", *login.small, *words)
    assert done.returncode == 0, done.stderr
    return login


def evaluate(login: Login, *words: str):
    return login.python("hlat.evaluate", "runs/x", "data=data", "hydra/launcher=slurm", *words)


def job_of(folder: Path) -> str:
    (receipts,) = (folder / "runs/x/evaluations").glob("*/submissions/1/receipts.jsonl")
    return json.loads(receipts.read_text().splitlines()[-1])["job"]


def state_of(login: Login, job: str) -> str:
    told = login.cluster.run("scontrol", "show", "job", job)
    return dict(word.split("=", 1) for word in told.split() if "=" in word)["JobState"]


def test_checkpoints_of_a_run_are_evaluated_beside_it_as_they_appear(asking: Login) -> None:
    """The run's record says that it goes on, until its job, which is alive meanwhile, ends it."""
    run = asking.folder / "runs/x"
    record = run / "events.jsonl"
    whole = record.read_text()
    record.write_text("".join(r for r in whole.splitlines(True) if '"finish"' not in r))
    last = shutil.move(run / "checkpoints/step_00000020", asking.folder)
    words = ("tasks=hlat_csp_en", "follow=true", "parallelism.tp=2")
    done = evaluate(asking, *words)
    assert done.returncode == 0, done.stderr
    job = job_of(asking.folder)
    assert f"job {job} evaluates runs/x/evaluations/hlat_csp_en-" in done.stdout
    assert "log:  hlat jobs logs runs/x/evaluations/" in done.stdout
    again = evaluate(asking, *words)
    assert again.returncode == 2, again.stdout
    assert f"runs/x: job {job} is " in again.stderr

    def scored() -> list[int]:
        return [row["step"] for row in asking.rows("x", "events.jsonl") if row["event"] == "score"]

    asking.cluster.wait_until(240, "step 10 has scores", lambda: scored() == [10])
    shutil.move(last, run / "checkpoints")
    with record.open("a") as file:
        file.writelines(r for r in whole.splitlines(True) if '"finish"' in r)
    asking.cluster.wait_until(240, "it is over", lambda: state_of(asking, job) == "COMPLETED")
    assert scored() == [10, 20]
    files = [path.name for path in sorted((run / "evaluations").glob("*.json"))]
    assert files == ["step_00000010.json", "step_00000020.json"]
    (row,) = asking.jobs("runs/x/evaluations").splitlines()[1:]
    assert row.split()[:2] == ["x:", next(p.name for p in (run / "evaluations").glob("hlat_*"))]
    assert row.split()[2:4] == [job, "COMPLETED"]
    assert row.split()[4:8] == ["1", "n1", "20", "csp_en"]


def test_an_evaluation_that_is_longer_than_its_limit_goes_on(asking: Login) -> None:
    asking.inject(SET_ASIDE_AFTER_A_TASK)
    limit = ("hydra.launcher.time=2", "hydra.launcher.signal_s=60")
    done = evaluate(asking, "tasks=hlat_csp_en,hlat_csp_fr", *limit)
    assert done.returncode == 0, done.stderr
    job = job_of(asking.folder)
    ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    asking.cluster.wait_until(360, "it is over", lambda: state_of(asking, job) in ended)
    (attempts,) = (asking.folder / "runs/x/evaluations").glob("*/submissions/1/attempts.jsonl")
    rows = [json.loads(line) for line in attempts.read_text().splitlines()]
    ends = [(row["exit"], row["step"]) for row in rows if row["event"] == "end"]
    log = asking.jobs("logs", "runs/x/evaluations")
    assert ends == [(75, 1), (0, 2)], log
    assert log.count("step_00000020: crows_pairs_english") == 1, log
    scores = json.loads((asking.folder / "runs/x/evaluations/step_00000020.json").read_text())
    assert {*scores["scores"]} == {"csp_en", "csp_fr"}
