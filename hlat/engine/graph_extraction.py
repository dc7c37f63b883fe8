"""Configuration of a run that extracts its graphs for neuron_parallel_compile.

neuron_parallel_compile runs the training program and records every graph instead of executing it.
The values that such a run computes are meaningless: skip checks of them and do not save them.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.distributed import rank_environment

_EXTRACTION_ENV = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by neuron_parallel_compile while it extracts graphs."""
_OVERRIDES: dict[str, Any] = {
    "run.name": "traced",
    "run.steps": 4,  # the first step has no optimizer state yet, the last one follows a save
    "checkpoint.every_steps": 3,
    "checkpoint.keep_every_steps": None,
    "checkpoint.destination": None,
    "checkpoint.start_from": None,
    "model.init_from": None,
    "model.mlp.moe.upcycling_noise": None,
    "evaluation.every_steps": 2,
    "recovery.max_restarts": 0,
    "recovery.step_timeout_s": None,
}
"""Overrides that reach every graph of a run within four steps, as in HLAT, which also saved at
step 3, and that isolate the run from other runs."""


def is_extracting_graphs(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process extracts graphs instead of executing them."""
    return environment.get(_EXTRACTION_ENV, "0") not in ("", "0")


@contextmanager
def create_run_root(config: Config) -> Iterator[Path]:
    """Yield a temporary run root, the same on all nodes, and remove it afterwards."""
    root = Path(config.run.root).absolute()
    root.mkdir(parents=True, exist_ok=True)
    if config.hardware.nodes == 1:
        with tempfile.TemporaryDirectory(prefix=".traced-", dir=root) as directory:
            yield Path(directory)
        return
    node = rank_environment.read_node_info(os.environ | build_node_environment(config))
    assert node is not None, "build_node_environment sets the rendezvous endpoint"
    shared = root / f".traced-{node.host}-{node.port}"
    try:
        yield shared
    finally:
        if node.node_rank == 0:
            shutil.rmtree(shared, ignore_errors=True)


def build_overrides(root: Path) -> dict[str, Any]:
    """Return the configuration overrides of a graph extraction run with this run root."""
    return {**_OVERRIDES, "run.root": str(root)}


def build_node_environment(config: Config) -> dict[str, str]:
    """Return the launcher variables of this node; {} for a single node or if they are set.

    Raises:
        ConfigError: This is not one process per node of hardware.nodes.
    """
    nodes = config.hardware.nodes
    if nodes == 1 or rank_environment.RDZV_ENDPOINT_ENV in os.environ:
        return {}
    info = rank_environment.read_rank_info()
    environment = os.environ | rank_environment.build_rendezvous_environment()
    if info.world_size != nodes or "MASTER_ADDR" not in environment:
        raise ConfigError(
            f"hardware.nodes={nodes} extract their graphs together; start this once on each, with "
            f"srun --nodes={nodes} --ntasks-per-node=1"
        )
    endpoint = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return {
        rank_environment.NUM_NODES_ENV: str(nodes),
        rank_environment.NODE_RANK_ENV: str(info.rank),
        rank_environment.RDZV_ENDPOINT_ENV: endpoint,
    }
