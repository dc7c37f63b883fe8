"""Where a process stands, as torchrun, Slurm or nobody tells it."""

import os
import subprocess
import sys

import pytest

from hlat.config.errors import ConfigError
from hlat.config.resolve import resolve
from hlat.engine import processes
from hlat.engine.processes import Place, first_host, must_start, place, rendezvous

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "trn-[003-004],trn-9",
    "SLURM_JOB_ID": "1234567",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "here"}


def test_a_process_finds_its_place() -> None:
    assert place({}) == Place(0, 1, 0, "nobody")
    assert place(SLURM) == Place(5, 8, 1, "Slurm")
    assert place(TORCHRUN) == Place(3, 4, 3, "torchrun")
    assert place(SLURM | TORCHRUN).starter == "torchrun"


def test_slurms_processes_meet_on_the_first_host() -> None:
    assert rendezvous(SLURM) == {"MASTER_ADDR": "trn-003", "MASTER_PORT": "24567"}
    assert rendezvous(SLURM | TORCHRUN) == rendezvous({}) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("trn-[003-007,9],other", "trn-003"),
        ("rack1-[12,14].local", "rack1-12.local"),
        ("a[1-2]b,c", "a1b"),
    ],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_who_starts_what(compose, monkeypatch) -> None:
    config = resolve(compose("parallelism.tp=2"))
    found = {"place": Place()}
    monkeypatch.setattr(processes, "place", lambda: found["place"])
    assert must_start(config)
    found["place"] = Place(1, 2, 1, "torchrun")
    assert not must_start(config)
    found["place"] = Place(1, 4, 1, "Slurm")
    with pytest.raises(ConfigError, match="needs 2 processes, Slurm started 4; start 2, or set"):
        must_start(config)
    found["place"] = Place()
    nodes = ("hardware.nodes=2", "hardware.processes_per_node=1")
    spread = resolve(compose("parallelism.tp=2", *nodes))
    with pytest.raises(ConfigError, match=r"hardware\.nodes=2, and this is one process"):
        must_start(spread)


@pytest.mark.parametrize(("parent_lives", "said"), [(True, "trains\n"), (False, "")])
def test_an_orphan_ends_before_it_trains(tmp_path, parent_lives: bool, said: str) -> None:
    """A supervisor that is killed while it starts a rank cannot end that rank any more."""
    program = (
        "from hlat.engine.processes import recorded\n"
        "from hlat.config.errors import Exit\n"
        "recorded(lambda: print('trains', flush=True) or Exit.FINISHED)"
    )
    parent = os.getpid() if parent_lives else 1
    variables = {processes.RECORDS: str(tmp_path), processes.PARENT: str(parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.stdout == said, done.stderr
    assert (done.returncode == 0) is parent_lives
