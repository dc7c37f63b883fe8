"""An upcycled model has the same initial weights in every layout as in one process."""

import functools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hlat.checkpoint.hugging_face.pretrained_weights import load_pretrained
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.upcycling_spec import build_dense_model
from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks
from tests.distributed.test_layouts import assert_rows_equal
from tests.support.model_families import build_transformers_model

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

SETTINGS = (
    *("model.mlp.kind=moe", "model.init_from=dense", "model.mlp.moe.upcycling_noise=0.1"),
    *("model.mlp.moe.num_experts=8", "model.mlp.moe.intermediate_size=48"),
    *("model.mlp.moe.num_dense_layers=1", "model.mlp.moe.routed_scale=2.5"),
)
LAYOUTS = {
    "tp2+sp": "tp=2 sequence_parallel=true",
    "ep2+dp2+pp2": "ep=2 dp=2 pp=2",
    "dp2+zero1": "dp=2 zero=1",
    "ep2+dp4+zero3": "ep=2 dp=4 zero=3",
    "tp2+ep2+dp2+zero3": "tp=2 sequence_parallel=true ep=2 dp=2 zero=3",
}
SLOW = {"dp2+zero1", "tp2+ep2+dp2+zero3"}


def load_and_train(
    config: Config, folder: Path
) -> tuple[dict[tuple[str, tuple[int, ...]], NDArray[np.float32]], list[tuple[float, ...]]]:
    """Return the initial weights that this rank saves, and the metrics of two steps."""
    engine = NativeEngine()
    engine.build(config, initialize=False)
    load_pretrained(str(folder), config.model, engine.state_shards(), config.run.seed)
    shards = {
        (shard.name, shard.offset): shard.tensor.float().numpy().reshape(shard.size).copy()
        for shard in engine.state_shards()
        if shard.is_main_replica and shard.name.startswith("weights/")
    }
    rows = [checks.run_step(engine, batch) for batch in checks.batches(config, 2)]
    engine.close()
    return shards, rows


@pytest.fixture(scope="module")
def dense_folder(configure, tmp_path_factory):
    """Save a dense model with the layers of a layout, and return its directory."""

    @functools.cache
    def save(num_layers: str) -> Path:
        model = configure("", *SETTINGS, num_layers).model
        folder = tmp_path_factory.mktemp("dense")
        build_transformers_model(build_dense_model(model, "llama")).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_weights_equal_one_process(ranks: Ranks, configure, dense_folder, layout: str) -> None:
    settings = LAYOUTS[layout]
    folder = dense_folder(layers(settings))
    shards, expected = load_and_train(configure("", layers(settings), *SETTINGS), folder)
    config = configure(settings, *SETTINGS)
    found = ranks.run(config.num_processes, load_and_train, config, folder)
    weights, others = (checks.joined(one) for one in ([own for own, _ in found], [shards]))
    assert weights.keys() == others.keys()
    assert any(".experts.7." in name for name in weights)
    for name, values in others.items():
        assert np.array_equal(weights[name], values), name
    for _, rows in found:
        assert_rows_equal(rows, expected)
