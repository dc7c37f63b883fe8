"""A run that only shows its graphs to a compiler: what it is told, where it lies, who starts it.

neuron_parallel_compile has a program run as it would train, and takes down every graph in place of
executing it. Whatever comes out of such a graph is garbage, so nobody may judge or keep it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.engine import processes

_VARIABLE = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by neuron_parallel_compile while it collects."""
_CHANGES: dict[str, Any] = {
    "run.name": "traced",
    "run.steps": 4,  # the first has no state of the optimizer yet, the last follows a save
    "checkpoint.every_steps": 3,
    "checkpoint.keep_every_steps": None,
    "checkpoint.destination": None,
    "checkpoint.start_from": None,
    "model.init_from": None,
    "evaluation.every_steps": 2,
    "recovery.max_restarts": 0,
    "recovery.step_timeout_s": None,
}
"""Every graph of a run within four steps, as in HLAT, which saved at step 3 as well; and no word to
or from any other run."""


def only_traces(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process only shows its graphs: no number of it means anything."""
    return environment.get(_VARIABLE, "0") not in ("", "0")


@contextmanager
def run_root(config: Config) -> Iterator[Path]:
    """A folder for the traced run, the same one on all its nodes; it is gone afterwards."""
    root = Path(config.run.root).absolute()
    root.mkdir(parents=True, exist_ok=True)
    if config.hardware.nodes == 1:
        with tempfile.TemporaryDirectory(prefix=".traced-", dir=root) as made:
            yield Path(made)
        return
    here = processes.node(os.environ | meeting(config))
    assert here is not None, "meeting says where it is"
    shared = root / f".traced-{here.host}-{here.port}"
    try:
        yield shared
    finally:
        if here.rank == 0:
            shutil.rmtree(shared, ignore_errors=True)


def changes(root: Path) -> dict[str, Any]:
    """What makes a run one that is traced in a folder, by key."""
    return {**_CHANGES, "run.root": str(root)}


def meeting(config: Config) -> dict[str, str]:
    """The variables by which the processes of several nodes find each other.

    Raises:
        ConfigError: There are others, and this process was not started beside one on each of them.
    """
    nodes = config.hardware.nodes
    if nodes == 1 or processes.MEETING in os.environ:
        return {}
    place, found = processes.place(), os.environ | processes.rendezvous()
    if place.size != nodes or "MASTER_ADDR" not in found:
        raise ConfigError(
            f"hardware.nodes={nodes} show their graphs together; start this once on each, with "
            f"srun --nodes={nodes} --ntasks-per-node=1"
        )
    return {
        processes.NODES: str(nodes),
        processes.NODE: str(place.rank),
        processes.MEETING: f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}",
    }
