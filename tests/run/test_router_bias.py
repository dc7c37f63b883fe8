"""Biases of routers in evaluations, averages and exports of a run."""

import pytest
import torch
from safetensors.torch import load_file

from hlat import export
from hlat.checkpoint import averaging, checkpoint_listing
from hlat.config.precision import Dtype
from hlat.config.resolve import resolve_config
from hlat.engine.native.native_engine import NativeEngine
from hlat.inference.model_source import find_model
from tests.run.conftest import call_command

MOE = [
    *("model.mlp.kind=moe", "model.mlp.moe.num_experts=4", "model.mlp.moe.bias_update_rate=0.001"),
    *("run.name=x", "run.steps=4", "checkpoint.every_steps=2", "model.family=mixtral"),
]
NAME = "buffers/model.layers.0.mlp.gate.e_score_correction_bias"


@pytest.mark.slow  # 20 s: a run
def test_evaluations_and_averages_have_the_bias_and_exports_refuse_it(
    runner, compose, small
) -> None:
    done = runner.run(*MOE)
    assert done.returncode == 0, done.stderr
    run_dir = runner.folder / "runs/x"
    first, last = (run_dir / f"checkpoints/step_{step:08}" for step in (2, 4))
    biases = [load_file(path / "rank_00000.safetensors")[NAME] for path in (first, last)]
    assert all(bias.any() for bias in biases)

    paths = averaging.select_checkpoints(run_dir, None, 2)
    checkpoints = [averaging.load_weighted_checkpoint(p, 1.0, lambda _: None) for p in paths]
    output = run_dir / "averages/mean"
    averaging.write_average(output, checkpoints, Dtype.bf16, lambda _: None)
    mean = load_file(output / "rank_00000.safetensors")[NAME]
    assert mean.dtype is torch.float32
    assert torch.equal(mean, (biases[0] + biases[1]) / 2)
    kinds = {one.path: one.kind for one in checkpoint_listing.list_checkpoints(run_dir)}
    assert kinds == {first: "full", last: "full", output: "weights only"}

    config = resolve_config(compose(*small, *MOE))
    for location, expected in ((last, biases[1]), (output, mean)):
        engine = NativeEngine()
        engine.build(config, training=False, initialize=False)
        find_model(str(location)).load_weights(engine.state_shards())
        assert torch.equal(engine.model_parts[0].get_buffer(_strip(NAME)), expected)
        engine.close()

    refused = call_command(export.main, runner.folder, "runs/x", "--output", "out")
    assert refused.code != 0
    assert "model.layers.0.mlp.gate.e_score_correction_bias in " in refused.err
    assert "differs from 0, and model.family=mixtral has no name for it" in refused.err
    assert not (runner.folder / "out").exists()


def _strip(name: str) -> str:
    return name.removeprefix("buffers/model.")
