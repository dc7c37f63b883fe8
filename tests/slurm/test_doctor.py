"""The doctor under srun, which checks the nodes of the step."""

import json
import subprocess
import sys

import pytest

MULTIPLIES_WRONGLY = """
import os
if os.environ.get("SLURM_PROCID") == "1":
    from hlat.engine import device_checks
    right = device_checks._matmul
    def wrong(one, other):
        result = right(one, other)
        result[7, 5] += 1
        return result
    device_checks._matmul = wrong
"""


@pytest.mark.slow  # tests/run/test_doctor.py checks this machine
@pytest.mark.parametrize(
    ("code", "last", "injected"),
    [
        pytest.param(0, "healthy; ", "", id="healthy"),
        pytest.param(4, "FAIL: machine; ", MULTIPLIES_WRONGLY, id="unhealthy"),
    ],
)
def test_check_the_nodes_of_a_step(login, code: int, last: str, injected: str) -> None:
    login.inject(injected)
    data = [argument for argument in login.small if argument.startswith("data.")]
    done = subprocess.run(
        [
            *("srun", "--nodes=2", "--ntasks-per-node=1"),
            *(sys.executable, "-m", "hlat.doctor", *data, "parallelism.tp=2", "run.name=x"),
        ],
        cwd=login.folder,
        env=login.environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)
    record = json.loads((login.folder / "runs/doctor/x/doctor.json").read_text())
    assert (record["healthy"], record["num_processes"]) == (code == 0, 2)
    excluded = [row for row in login.rows("doctor/x", "events.jsonl") if row["event"] == "exclude"]
    assert [row["host"] for row in excluded] == ([] if code == 0 else ["n2"])
