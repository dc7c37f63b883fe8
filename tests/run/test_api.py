"""The Python API on a trained run, and finished runs that are not trained again."""

import doctest
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import hlat
from hlat import api
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.distributed import rank_environment
from tests.support.other_user import act_as_nobody, needs_root


@pytest.fixture
def root(runner_at_step_2) -> Path:
    return runner_at_step_2.folder / "runs"


@pytest.mark.slow
def test_runs_are_a_table(root) -> None:
    table = hlat.runs(root, where="config.optimizer.name=adamw")
    assert table["run"].to_pylist() == ["x"]
    assert table["state"].to_pylist() == ["finish"]
    assert table["config.run.seed"].to_pylist() == [12349]
    assert hlat.runs(root, where="step>2").num_rows == 0
    with pytest.raises(ConfigError, match="no run has this column"):
        hlat.runs(root, where="stepp>2")


def test_a_run_has_configuration_metrics_tensors_and_model(root) -> None:
    run = hlat.load_run(root / "x")
    assert run.config.run.steps == run.settings["run.steps"] == 2
    assert run.metrics["step"].to_pylist() == [1, 2]
    assert run.metrics["loss"][1].as_py() == run.summary["final_loss"]
    assert run.heldout["mean"].to_pylist()[-1] == run.summary["heldout_bits_per_byte"]
    assert run.checkpoint_steps == [2]
    tensors = run.load_tensors()
    assert all(name.startswith("weights/") for name in tensors)
    name = next(iter(tensors))
    assert run.load_tensors(2, [name])[name].equal(tensors[name])
    with pytest.raises(ConfigError, match="has no tensor nothing"):
        run.load_tensors(names=["nothing"])
    with run.load_model() as model:
        text = model.generate("def main", max_tokens=8, temperature=0)
        assert text == model.generate("def main", 8, temperature=1e-39)
        stopped = model.generate("def main", 8, temperature=0, stop=text[3:4])
        assert stopped == text.partition(text[3])[0]
        with pytest.raises(ConfigError, match="top_p=0 is not a number above 0"):
            model.generate("def main", top_p=0)
        assert model.score("def ", "main") < 0
    with pytest.raises(ConfigError, match="is not a run directory"):
        hlat.load_run(root)


def test_the_examples_of_docstrings(root, monkeypatch) -> None:
    monkeypatch.chdir(root.parent)
    found = doctest.DocTestFinder().find(api, extraglobs={"hlat": hlat})
    examples = [test for test in found if test.examples]
    assert [test.name.removeprefix("hlat.api.") for test in examples] == [
        *("Run.load_model", "Run.load_tensors", "load_run", "runs")
    ]
    runner = doctest.DocTestRunner()
    for test in examples:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.slow
def test_an_equal_run_under_another_name_is_a_copy(runner_at_step_2) -> None:
    runner = runner_at_step_2
    equal = runner.run("run.name=y", "run.steps=2")
    assert equal.returncode == 0
    assert "runs/x has finished with the same settings, code and data" in equal.stdout
    assert runner.rows("y", "events.jsonl") == runner.rows("x", "events.jsonl")
    run = hlat.load_run(runner.folder / "runs/y")
    assert (run.config.run.name, run.checkpoint_steps) == ("y", [2])
    assert run.load_tensors(2, ["weights/model.norm.weight"])
    table = hlat.runs(runner.folder / "runs")
    assert table["copy_of"].to_pylist() == [None, "x"]


@pytest.mark.slow  # trains two steps
def test_a_copy_is_extended_without_a_change_of_the_other_run(runner_at_step_2) -> None:
    runner = runner_at_step_2
    assert runner.run("run.name=y", "run.steps=2").returncode == 0
    extended = runner.run("run.name=y", "run.steps=4")
    assert "resuming from runs/y/checkpoints/step_00000002" in extended.stdout
    assert runner.losses("y")[:2] == runner.losses("x")
    assert (len(runner.losses("y")), len(runner.losses("x"))) == (4, 2)


@needs_root
def test_the_run_of_another_user_is_found_or_refused(
    runner_at_step_2, small, compose, monkeypatch, capsys
) -> None:
    """Use one command of two users: its run directory is not writable for the second one."""
    from hlat.data import training_data
    from hlat.recovery import run_copy
    from hlat.tracking import finished_runs, provenance, run_directory

    os.chmod(runner_at_step_2.folder, 0o755)
    monkeypatch.chdir(runner_at_step_2.folder)
    recorded = json.loads(Path("runs/x/provenance.json").read_text())
    code = recorded["identity"]["code"]
    monkeypatch.setattr(provenance, "compute_code_digest", lambda: code)
    data = SimpleNamespace(fingerprint=recorded["data"])  # this user may not read the corpus
    monkeypatch.setattr(training_data, "open_training_data", lambda *_: data)
    equal, other = (
        resolve_config(compose(*small, "run.name=x", f"run.steps={steps}")) for steps in (2, 3)
    )
    with act_as_nobody():
        assert run_copy.use_finished_run(equal, "", [])
        assert "runs/x has finished with the same settings" in capsys.readouterr().out
        assert finished_runs.find_finished_run(other) is None
        with (
            pytest.raises(ConfigError, match=r"run.name=x: runs/x belongs to another user"),
            run_directory.acquire_run_dir(other.run),
        ):
            pass
    os.chmod("runs/x", 0o700)
    with act_as_nobody():
        assert finished_runs.find_finished_run(equal) is None


@pytest.mark.slow
def test_an_equal_run_of_a_job_ends_as_finished(runner_at_step_2, tmp_path) -> None:
    """Require the exit record of a process under a supervisor."""
    runner = runner_at_step_2
    names = (rank_environment.RECORDS_DIR_ENV, rank_environment.PARENT_PID_ENV)
    runner.environment |= dict(zip(names, (str(tmp_path), str(os.getpid())), strict=True))
    done = runner.run_process("run.name=y", "run.steps=2")
    assert "nothing to do" in done.stdout
    assert json.loads((tmp_path / "0.json").read_text()) == {"exit": 0}


@pytest.mark.slow  # trains two runs
def test_another_setting_or_a_request_trains(runner_at_step_2) -> None:
    runner = runner_at_step_2
    other = runner.run("run.name=y", "run.steps=2", "optimizer.lr=0.004")
    assert other.returncode == 0
    assert len(runner.losses("y")) == 2
    repeated = runner.run("run.name=z", "run.steps=2", "run.repeat=true")
    assert repeated.returncode == 0
    assert runner.losses("z") == runner.losses("x")


@pytest.mark.slow  # trains a run
@pytest.mark.parametrize("changed", ["code", "data", "removed"])
def test_a_run_of_other_code_or_data_is_not_equal(runner_at_step_2, changed, monkeypatch) -> None:
    from hlat.tracking import finished_runs

    runner = runner_at_step_2
    if changed == "code":
        monkeypatch.setattr(finished_runs.provenance, "compute_code_digest", lambda: "other")
    elif changed == "data":
        (record,) = (runner.folder / "runs/.finished").rglob("*.json")
        record.write_text(json.dumps(json.loads(record.read_text()) | {"data": "other"}))
    else:
        (runner.folder / "runs/x/provenance.json").unlink()
    assert runner.run("run.name=y", "run.steps=2").returncode == 0
    assert len(runner.losses("y")) == 2
