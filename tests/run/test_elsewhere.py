"""Runs with checkpoints at a file: URL, which is used as an object store without renames."""

import json
import signal
import sys

import pytest

from hlat import average, export
from hlat.checkpoint import __main__ as care
from hlat.recovery import preflight
from hlat.storage.remote_path import RemotePath, StorageUnavailableError

LAYOUT = ("parallelism.tp=2", "parallelism.sequence_parallel=true")


@pytest.fixture
def there(tmp_path):
    return tmp_path / "bucket"


@pytest.fixture
def saved(runner, there):
    """Train the small run up to step 10, under the name `x`, with checkpoints at a URL."""
    done = runner.run("run.name=x", "run.steps=10", f"checkpoint.destination=file://{there}")
    assert done.returncode == 0, done.stderr
    return f"file://{there}/x"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow  # test_resume.py kills a run with checkpoints on the same disk
@pytest.mark.parametrize("steps", [(12,), (3, 7)])
def test_resume_after_sigkill_is_bit_identical(runner, uninterrupted, there, steps):
    # Without asynchronous saves, the state of step 5 is complete when the process is killed
    settings = (f"checkpoint.destination=file://{there}", "checkpoint.asynchronous=false")
    for step in steps:
        killed = runner.run_until(step, signal.SIGKILL, "run.name=x", *settings)
        assert killed.returncode == -signal.SIGKILL
    again = runner.run("run.name=x", *settings)
    assert again.returncode == 0, again.stderr
    assert f"resuming from file://{there}/x/checkpoints/step_000000" in again.stdout
    assert runner.losses("x") == uninterrupted.losses("whole")
    assert names(there / "x") == ["checkpoints", "run_directory.txt"]
    kept = names(uninterrupted.folder / "runs/whole/checkpoints")
    assert names(there / "x/checkpoints") == kept
    weights = there / "x/checkpoints/step_00000020/rank_00000.safetensors"
    assert weights.read_bytes() == uninterrupted.weights("whole", 20)
    assert not (runner.folder / "runs/x/checkpoints").exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("processes")
def test_save_from_two_processes_and_resume_with_another_layout(runner, uninterrupted, there):
    destination = f"checkpoint.destination=file://{there}"
    done = runner.run_process("run.name=x", destination, "run.steps=12", *LAYOUT)
    assert done.returncode == 0, done.stderr
    files = names(there / "x/checkpoints/step_00000010")
    assert [name for name in files if name.startswith("rank")] == [
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ]
    again = runner.run("run.name=x", destination)
    assert again.returncode == 0, again.stderr
    assert "resuming from file://" in again.stdout
    for found, expected in zip(runner.losses("x"), uninterrupted.losses("whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # 3 s
def test_save_to_a_directory_with_milestones(runner, uninterrupted, there):
    arguments = ("run.name=x", "checkpoint.destination=bucket", "checkpoint.milestone_tokens=5000")
    assert runner.run(*arguments, "run.steps=12").returncode == 0
    assert runner.run(*arguments).returncode == 0
    assert runner.losses("x") == uninterrupted.losses("whole")
    assert names(there / "x/milestones") == ["step_00000010", "step_00000020"]
    assert names(there / "x") == ["checkpoints", "milestones", "run_directory.txt"]


@pytest.mark.slow  # one or more whole processes
def test_branch_from_a_url(runner, uninterrupted, saved):
    start = f"checkpoint.start_from={saved}/checkpoints/step_00000010"
    done = runner.run("run.name=branch", start)
    assert done.returncode == 0, done.stderr
    assert runner.losses("branch") == uninterrupted.losses("whole")[10:]


@pytest.mark.slow
def test_export_by_url_and_by_run_directory(runner, saved, there, monkeypatch, capsys):
    monkeypatch.chdir(runner.folder)
    sources = ("runs/x", saved, f"{saved}/checkpoints", f"{saved}/checkpoints/step_00000010")
    for number, source in enumerate(sources):
        assert export.main([source, "--output", f"out{number}"]) == 0, capsys.readouterr().err
        assert f"{saved}/checkpoints/step_00000010: step 10" in capsys.readouterr().out
    exported = {(runner.folder / f"out{n}/model.safetensors").read_bytes() for n in range(4)}
    assert len(exported) == 1
    assert export.main([f"file://{there}/y", "--output", "out"]) == 2
    assert f"file://{there}/y does not exist" in capsys.readouterr().err
    assert f"such as {saved}" in refusal(f"file://{there}/xx", capsys)
    monkeypatch.setattr(RemotePath, "list_sizes", silence)
    assert "503" in refusal("runs/x", capsys)


def silence(path):
    raise StorageUnavailableError(f"{path}: ClientError: 503")


def refusal(source, capsys):
    assert export.main([source, "--output", "out"]) == 2
    return capsys.readouterr().err


DESTINATIONS = {
    "nowhere://x": "checkpoint.destination: nowhere://x: nowhere is not an allowed protocol",
    "file:///proc/x": "checkpoint.destination=file:///proc/x cannot be used (file:///proc/x/",
    "file:///dev/null": "checkpoint.destination=file:///dev/null cannot be used (file:///dev/null/",
    "/proc/x": "checkpoint.destination=/proc/x cannot be used (FileNotFoundError:",
    "ftp://me:hunter2@x/y": "checkpoint.destination contains a password",
}


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_refuse_a_destination_that_is_not_writable(runner, refused, destination):
    done = runner.run("run.name=x", f"checkpoint.destination='{destination}'")
    refused(done, DESTINATIONS[destination])
    assert len(done.stderr.splitlines()) == 1
    assert runner.rows("x", "events.jsonl") == []


def test_name_the_missing_package_of_a_protocol(runner, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    done = runner.run("run.name=x", "checkpoint.destination=s3://bucket/x")
    refused(done, "checkpoint.destination=s3://bucket/x needs a package that is not installed")
    assert "s3fs" in done.stderr


@pytest.mark.slow
def test_refuse_a_change_of_destination(runner, refused, saved, there):
    refused(
        runner.run("run.name=x"),
        f"checkpoint.destination=null: the checkpoints of runs/x are in {saved}; set it back, or copy "
        f"{saved}/checkpoints to runs/x/checkpoints",
    )
    refused(
        runner.run("run.name=x", f"checkpoint.destination={there}2"),
        f"checkpoint.destination={there}2: the checkpoints of runs/x are in {saved}; set it back",
    )
    (there / "x/checkpoints").rename(runner.folder / "runs/x/checkpoints")
    done = runner.run("run.name=x", "run.steps=11")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in runner.losses("x")] == [*range(1, 12)]
    assert not list((runner.folder / "runs/x").glob("*.txt"))
    refused(
        runner.run("run.name=x", f"checkpoint.destination=file://{there}"),
        "the checkpoints of runs/x are in runs/x; set it back",
    )


def test_train_on_after_a_failed_save(runner, uninterrupted, there, monkeypatch):
    write_blocks = RemotePath.write_blocks

    def fail_once(path, blocks):
        if path.parent.name == "step_00000010" and path.name == "state.json":
            silence(path)
        write_blocks(path, blocks)

    monkeypatch.setattr(RemotePath, "write_blocks", fail_once)
    done = runner.run("run.name=x", f"checkpoint.destination=file://{there}")
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if "WARNING: no checkpoint" in line]
    assert f"step 10: file://{there}/x/checkpoints/step_00000010/state.json: ClientError" in told
    kept = names(there / "x/checkpoints")
    assert kept == ["step_00000005", "step_00000015", "step_00000020"]
    assert runner.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow  # one or more whole processes
def test_list_verify_prune_and_average_checkpoints_at_a_url(
    runner, saved, there, monkeypatch, capsys
):
    monkeypatch.chdir(runner.folder)

    def do(main, *arguments):
        code = main(arguments)
        return code, capsys.readouterr().out

    code, out = do(average.main, "runs/x", "last=2")
    assert code == 0
    assert "averaged to runs/x/averages/step_00000010_of_5_10" in out
    code, out = do(care.main, "ls", "runs/x", "--json")
    assert [(row["step"], row["state"], row["path"]) for row in json.loads(out)] == [
        (5, "committed", f"{saved}/checkpoints/step_00000005"),
        (10, "committed", f"{saved}/checkpoints/step_00000010"),
        (10, "committed", "runs/x/averages/step_00000010_of_5_10"),
    ]
    code, out = do(care.main, "verify", saved)
    assert (code, out.count(": ok")) == (0, 2)
    code, out = do(care.main, "prune", "runs/x", "keep_last=1", "--yes")
    assert (code, names(there / "x/checkpoints")) == (0, ["step_00000010"])
    (there / "x/checkpoints/step_00000010/state.json").write_text("{}")
    code, out = do(care.main, "verify", "runs/x", "--step", "10")
    assert (code, "state.json has 2 bytes" in out) == (1, True)
    assert care.main(["prune", saved, "keep_last=1"]) == 2
    assert "prune needs the directory of the run" in capsys.readouterr().err


@pytest.mark.slow
def test_check_free_space_of_a_directory_only(runner, there, monkeypatch):
    monkeypatch.setattr(preflight, "compute_checkpoint_bytes", lambda config: 10**18)
    arguments = ("run.name=x", "run.steps=1", "recovery.preflight=true")
    done = runner.run(*arguments, f"checkpoint.destination={there}")
    assert done.returncode == 2
    assert f"{there}/x has" in done.stderr
    done = runner.run(*arguments, f"checkpoint.destination=file://{there}")
    assert done.returncode == 0, done.stderr
