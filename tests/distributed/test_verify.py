"""Each rank verifies a part of a checkpoint, and all agree whether it is valid."""

from pathlib import Path

import pytest

from hlat.checkpoint import checkpoint_store
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed.ranks import Ranks
from tests.support.newest_checkpoint import find_newest_valid

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUT = "dp=4 zero=1"


def save_two(config: Config, folder: Path) -> None:
    engine = NativeEngine()
    engine.build(config)
    for step in (1, 2):
        checkpoint_store.save_checkpoint(
            folder, step, engine.state_shards(), {}, engine.parallel_state.world_group
        )
    engine.close()


def find(config: Config, folder: Path) -> tuple[str, list[str], int]:
    """Return the newest valid checkpoint, the refused ones, and the bytes that this rank has read."""
    engine = NativeEngine()
    engine.build(config)
    parallel_state, read = engine.parallel_state, []
    path, refused = find_newest_valid(
        folder, on_progress=read.append, process_group=parallel_state.world_group
    )
    engine.close()
    assert path is not None
    return path.name, refused, sum(read)


@pytest.mark.slow
def test_ranks_verify_parts_and_agree(ranks: Ranks, configure, tmp_path: Path) -> None:
    config = configure(LAYOUT)
    ranks.run(4, save_two, config, tmp_path)
    newest = tmp_path / "step_00000002"
    files = {path.name: path.stat().st_size for path in newest.iterdir()}
    found = ranks.run(4, find, config, tmp_path)
    assert [one[:2] for one in found] == [("step_00000002", [])] * 4
    total = sum(files.values()) - files["manifest.json"] - files["COMMITTED"]
    num_bytes = [one[2] for one in found]
    assert sum(num_bytes) == total
    assert max(num_bytes) < 0.4 * total

    for number in (0, 3):
        damaged = newest / f"rank_{number:05d}.safetensors"
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = ranks.run(4, find, config, tmp_path)
        assert [one[:2] for one in found] == [found[0][:2]] * 4
        path, (refused,), _ = found[0]
        assert path == "step_00000001"
        assert f"{damaged} differs from what was written" in refused
        damaged.write_bytes(content)
