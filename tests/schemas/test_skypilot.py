"""SkyPilot reads the recorded tasks and rejects invalid ones."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORDS = sorted((HERE.parent / "golden/tasks").glob("*.yaml"))
BROKEN = {
    "a field that it has not": ("num_nodes: 4", "nodes: 4", "did you mean 'num_nodes'"),
    "an exit code that is none": ("- 75", "- 256", "256"),
    "a type that it does not know": (
        "instance_type: p5.",
        "instance_type: p9.",
        "Invalid instance type",
    ),
    "a mode of a bucket that is none": ("MOUNT_CACHED", "MOUNTED", "MOUNTED"),
    "a variable that is no text": ("PYTHONUNBUFFERED: '1'", "9: '1'", "9"),
}


@pytest.fixture(scope="module")
def python() -> Path:
    program = HERE.parent.parent / ".venv-skypilot/bin/python"
    if not program.exists():
        pytest.skip("no .venv-skypilot; `make test-skypilot` makes it")
    return program


@pytest.fixture(scope="module")
def results(python: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return the results of SkyPilot for all recorded and invalid tasks by name."""
    files = {file.stem: file for file in RECORDS}
    for name, (old, new, _) in BROKEN.items():
        files[name] = tmp_path_factory.mktemp("broken") / "task.yaml"
        text = files["h100_p5"].read_text()
        assert old in text
        files[name].write_text(text.replace(old, new))
    done = subprocess.run(
        [python, HERE / "tasks.py", *files.values()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(files, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("record", RECORDS, ids=lambda file: file.stem)
def test_read_recorded_tasks(record: Path, results) -> None:
    found, text = results[record.stem], record.read_text()
    assert "error" not in found, found
    assert f"num_nodes: {found['nodes']}\n" in text
    assert found["mounts"] == ["/mnt/hlat"]
    codes = [4, 75] if record.stem == "h200_p5en" else [75]
    assert found["recovery"]["recover_on_exit_codes"] == codes
    assert found["recovery"]["max_restarts_on_errors"] == 0
    is_gpu = record.stem != "trn2_48xl"
    assert found["network_tier"] == ("best" if is_gpu else None)  # EFA


@pytest.mark.parametrize("name", BROKEN)
def test_reject_invalid_tasks(name: str, results) -> None:
    assert BROKEN[name][2] in results[name]["error"]


def test_command_has_the_options(python: Path) -> None:
    sky = shutil.which("sky", path=str(python.parent))
    assert sky is not None
    done = subprocess.run([sky, "jobs", "launch", "--help"], capture_output=True, text=True)
    assert all(option in done.stdout for option in ("--yes", "--detach-run", "--secret "))
