"""A run that only shows its graphs to a compiler: what it is told, where it lies, who starts it.

neuron_parallel_compile has a program run as it would train, and takes down every graph in place of
executing it. Whatever comes out of such a graph is garbage, so nobody may judge or keep it.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hlat.config import entry
from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.engine import processes

_VARIABLE = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by neuron_parallel_compile while it collects."""
_OVERRIDES = (
    "run.name=traced",
    "run.steps=4",  # the first has no state of the optimizer yet, the last follows a save
    "checkpoint.every_steps=3",
    "checkpoint.keep_every_steps=null",
    "checkpoint.destination=null",
    "checkpoint.start_from=null",
    "model.init_from=null",
    "evaluation.every_steps=2",
    "recovery.max_restarts=0",
    "recovery.step_timeout_s=null",
)
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
    step = "-".join(os.environ.get(f"SLURM_{name}_ID", "0") for name in ("JOB", "STEP"))
    shared = root / f".traced-{step}"
    try:
        yield shared
    finally:
        if processes.place().rank == 0:
            shutil.rmtree(shared, ignore_errors=True)


def command(config: Config, overrides: list[str], root: Path) -> list[str]:
    """What traces a configuration on this node, together with the other nodes.

    Raises:
        ConfigError: There are others, and this process was not started beside one on each of them.
    """
    told = [*overrides, *_OVERRIDES, f"run.root={json.dumps(str(root))}"]
    train, nodes = entry.command(sys.executable, told), config.hardware.nodes
    if nodes == 1:
        return train
    place, meeting = processes.place(), os.environ | processes.rendezvous()
    if place.size != nodes or "MASTER_ADDR" not in meeting:
        raise ConfigError(
            f"hardware.nodes={nodes} show their graphs together; start this once on each, with "
            f"srun --nodes={nodes} --ntasks-per-node=1"
        )
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"),
        *(f"--node-rank={place.rank}", f"--nproc-per-node={config.hardware.processes_per_node}"),
        *(f"--master-addr={meeting['MASTER_ADDR']}", f"--master-port={meeting['MASTER_PORT']}"),
        *train[1:],
    ]
