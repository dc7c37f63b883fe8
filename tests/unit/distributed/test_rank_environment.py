"""Ranks from the variables of torchrun and Slurm, and the decision to launch workers."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.resolve import resolve_config
from hlat.distributed import rank_environment
from hlat.distributed.rank_environment import (
    RankInfo,
    build_rendezvous_environment,
    must_launch_workers,
    parse_first_host,
    read_rank_info,
)

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "trn-[003-004],trn-9",
    "SLURM_JOB_ID": "1234567",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "here"}


def test_rank_info() -> None:
    assert read_rank_info({}) == RankInfo(0, 1, 0, "none")
    assert read_rank_info(SLURM) == RankInfo(5, 8, 1, "Slurm")
    assert read_rank_info(TORCHRUN) == RankInfo(3, 4, 3, "torchrun")
    assert (read_rank_info({}).is_rank0, read_rank_info(SLURM).is_rank0) == (True, False)
    assert read_rank_info(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm_rendezvous_on_the_first_host() -> None:
    assert build_rendezvous_environment(SLURM) == {"MASTER_ADDR": "trn-003", "MASTER_PORT": "24567"}
    assert build_rendezvous_environment(SLURM | TORCHRUN) == build_rendezvous_environment({}) == {}


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
def test_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert parse_first_host(hosts) == first


def test_must_launch_workers(compose, monkeypatch) -> None:
    config = resolve_config(compose("parallelism.tp=2"))
    launched = {"info": RankInfo()}
    monkeypatch.setattr(rank_environment, "read_rank_info", lambda: launched["info"])
    assert must_launch_workers(config)
    launched["info"] = RankInfo(1, 2, 1, "torchrun")
    assert not must_launch_workers(config)
    launched["info"] = RankInfo(1, 4, 1, "Slurm")
    with pytest.raises(ConfigError, match="needs 2 processes, Slurm started 4; start 2, or set"):
        must_launch_workers(config)
    launched["info"] = RankInfo()
    nodes = ("hardware.nodes=2", "hardware.processes_per_node=1")
    spread = resolve_config(compose("parallelism.tp=2", *nodes))
    with pytest.raises(ConfigError, match=r"hardware\.nodes=2, and this is one process"):
        must_launch_workers(spread)


def test_srun_does_not_start_the_ranks_of_nxd(compose, monkeypatch) -> None:
    config = resolve_config(compose("parallelism.tp=2"))
    config.engine.name = EngineBackend.nxd
    info = RankInfo(1, 2, 1, "Slurm")
    monkeypatch.setattr(rank_environment, "read_rank_info", lambda: info)
    with pytest.raises(
        ConfigError, match=r"nxd needs torchrun, and srun started 2.*launcher=slurm"
    ):
        must_launch_workers(config)
