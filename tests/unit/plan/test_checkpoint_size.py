"""Planned checkpoint sizes against saved files."""

import pytest

from hlat.checkpoint import checkpoint_store
from hlat.config.resolve import resolve_config
from hlat.engine.native.native_engine import NativeEngine
from hlat.plan.memory_estimate import compute_checkpoint_bytes


@pytest.mark.parametrize(
    ("recipe", "tied"),
    [
        *(("fp32", "true"), ("bf16", "false"), ("mixed", "false"), ("bf16_sr_master", "true")),
        pytest.param("fp32", "false", marks=pytest.mark.slow),
        pytest.param("bf16", "true", marks=pytest.mark.slow),
        pytest.param("mixed", "true", marks=pytest.mark.slow),
        pytest.param("bf16_sr_master", "false", marks=pytest.mark.slow),
    ],
)
def test_planned_size_of_a_checkpoint(compose, small, tmp_path, recipe, tied) -> None:
    config = resolve_config(compose(*small, f"precision={recipe}", f"model.tie_embeddings={tied}"))
    engine = NativeEngine()
    engine.build(config)
    path = checkpoint_store.save_checkpoint(tmp_path, 1, engine.state_shards(), {})
    size = sum(file.stat().st_size for file in path.iterdir())
    planned = compute_checkpoint_bytes(config)
    assert planned < size < 1.02 * planned
