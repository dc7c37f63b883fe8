"""Host memory of a rank with engine=nxd, by part of a run.

    PYTHONPATH=.:$NXD_SOURCE/src .venv-nxd/bin/python benchmarks/scale/nxd_host_memory.py [LAYERS]

Four ranks (tp=2, dp=2, ZeRO-1, precision=mixed) train three steps and save twice on lazy tensors of
XLA's CPU client, so the memory of the device is part of the process's memory. In the parts listed
here, only `build` and `step` allocate memory of the device.
"""

import json
import sys
import tempfile

from omegaconf import OmegaConf

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.model.decoder_spec import list_parameter_specs
from tests.nxd.support.ranks import run

SHAPE = (
    *("model.hidden_size=1024", "model.intermediate_size=2816"),
    *("model.num_attention_heads=16", "model.num_key_value_heads=8"),
    *("batch.global_batch_size=4", "batch.micro_batch_size=2", "batch.sequence_length=32"),
)
RUN = ("run.name=memory", "run.steps=3", "checkpoint.every_steps=2", "evaluation.every_steps=null")
LAYOUT = (
    *("engine=nxd", "precision=mixed"),
    *("parallelism.tp=2", "parallelism.dp=2", "parallelism.zero=1"),
)


def main() -> None:
    """Print a line per part of the run of rank 0, in MB."""
    for num_layers in map(int, sys.argv[1:] or ["2", "8"]):
        with tempfile.TemporaryDirectory() as root:
            layers = f"model.num_layers={num_layers}"
            composed = compose_config([*SHAPE, *RUN, *LAYOUT, layers, f"run.root={root}"])
            config = resolve_config(composed)
            yaml = OmegaConf.to_yaml(composed)
            parts = run(4, "memory.parts_of_run", config, yaml, mode="xla", seconds=600)[0]
        numel = sum(spec.numel for spec in list_parameter_specs(config.model))
        state = 12 * numel / config.num_processes
        print(json.dumps({"layers": num_layers, "state_mb": round(state / 1e6)}))
        for name, private, increase in parts:
            print(json.dumps({name: [round(private / 1e6), round(increase / 1e6)]}), flush=True)


if __name__ == "__main__":
    main()
