"""The doctor under srun, where it checks the nodes that it is given."""

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


@pytest.mark.parametrize(
    ("planted", "code", "last"), [("", 0, "healthy; "), (MULTIPLIES_WRONGLY, 4, "FAIL: machine; ")]
)
def test_it_examines_the_nodes_of_a_step(login, planted: str, code: int, last: str) -> None:
    (login.folder / "sitecustomize.py").write_text(planted)
    login.environment["PYTHONPATH"] += f":{login.folder}"
    data = [word for word in login.small if word.startswith("data.")]
    done = subprocess.run(
        [
            *("srun", "--nodes=2", "--ntasks-per-node=1"),
            *(sys.executable, "-m", "hlat.doctor", *data, "parallelism.tp=2", "run.name=x"),
        ],
        cwd=login.folder,
        env=login.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)
    record = json.loads((login.folder / "runs/doctor/x/doctor.json").read_text())
    assert (record["healthy"], record["num_processes"]) == (code == 0, 2)
    excluded = [row for row in login.rows("doctor/x", "events.jsonl") if row["event"] == "exclude"]
    assert [row["host"] for row in excluded] == ([] if code == 0 else ["n2"])
