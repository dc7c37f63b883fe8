"""Faults of W&B's process, servers and disk do not block or fail a run.

The library is not mocked; each test uses a new process, which must be able to exit.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = REPOSITORY / "tests/contract/wandb_fault.py"
MAX_SECONDS = 20.0
"""Limit of a call that does not block; a blocking one never returns. Allows for a busy machine."""


def _outcome(what: str, folder: Path, **variables: str) -> tuple[dict[str, float], str, str]:
    """Return the seconds of logging and finishing, and other output."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment = {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "NETRC": str(folder / "none"),
        **variables,
    }
    command = [sys.executable, str(SCRIPT), what, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *output, seconds = done.stdout.splitlines()
    return json.loads(seconds), "\n".join(output), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="finds W&B's process in /proc")
def test_the_wandb_process_is_killed(tmp_path: Path) -> None:
    seconds, _, errors = _outcome("killed", tmp_path)
    assert seconds["rows"] < MAX_SECONDS
    assert seconds["finish"] < MAX_SECONDS
    (warning,) = errors.splitlines()
    # Depending on timing, the pipe or a response fails first
    form = r"hlat W&B is disabled after \w+Error(: .+)?; training continues"
    assert re.fullmatch(form, warning)


@pytest.mark.skipif(sys.platform != "linux", reason="finds W&B's process in /proc")
@pytest.mark.slow
def test_the_wandb_process_hangs(tmp_path: Path) -> None:
    seconds, _, errors = _outcome("hangs", tmp_path)
    assert seconds["rows"] < MAX_SECONDS
    assert seconds["finish"] < MAX_SECONDS
    assert errors == "hlat W&B has not finished after 1 s\n"


@pytest.mark.slow
def test_the_wandb_servers_are_unreachable(tmp_path: Path) -> None:
    """Log offline without an accessible server, and write the API key to no file."""
    key = "5f2d9c0a" * 5
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": key}
    seconds, output, errors = _outcome("nothing", tmp_path, **unreachable)
    assert seconds["rows"] < MAX_SECONDS
    assert output.startswith("W&B cannot be reached (Failed to authenticate with http://127")
    assert output.endswith(f"wandb sync {tmp_path}/wandb/offline-run-*-abcd1234")
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not [
        content
        for content in [*written, output.encode(), errors.encode()]
        if key.encode() in content
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow  # waits for W&B
def test_the_disk_is_full(small_disk: Path) -> None:
    seconds, _, errors = _outcome("nothing", small_disk)
    assert errors.count("is full; W&B may lack rows") == 1
    assert seconds["rows"] < MAX_SECONDS
    assert seconds["finish"] < 30.0 + MAX_SECONDS
    left = os.statvfs(small_disk)
    assert left.f_bavail * left.f_frsize < 16_384, "the disk was never full"
