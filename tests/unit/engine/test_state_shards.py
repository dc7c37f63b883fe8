"""Ranks sample every initial value once, and each gets its columns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.distributed.state_shard import StateShard
from hlat.engine import state_shards
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.weight_initialization import compute_initial_values

NAME = "model.layers.0.mlp.down_proj.weight"


class ThreadAxis:
    """Rank of an axis of threads in this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, sent: dict) -> None:
        self.rank, self.size, self._barrier, self._sent = rank, size, barrier, sent

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._barrier.wait()
        self._sent[self.rank] = tensor
        self._barrier.wait()
        return torch.stack([self._sent[rank] for rank in range(self.size)])

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.all_gather(tensor)[:, self.rank].contiguous()


@pytest.fixture
def config(compose):
    return resolve_config(compose("model.intermediate_size=96"))


def build_shard(shape, offset, size, name: str = NAME) -> StateShard:
    return StateShard(f"weights/{name}", shape, offset, size, torch.full(size, torch.nan))


@pytest.mark.parametrize("chunk_size", [10**6, 300])
@pytest.mark.parametrize("blocks", [(0, 1, 2), (2, 0, 1)])
def test_columns_are_sampled_once_and_exchanged(monkeypatch, config, chunk_size, blocks) -> None:
    """Sample rows that the ranks do not divide, with the columns of ranks in any order."""
    specs = {spec.name: spec for spec in list_parameter_specs(config.model)}
    shape, num_sampled = specs[NAME].shape, []

    def sample(parameter, model, seed, offset, size):
        num_sampled.append(size[0] * size[1])
        return compute_initial_values(parameter, model, seed, offset, size)

    monkeypatch.setattr(state_shards, "compute_initial_values", sample)
    monkeypatch.setattr(state_shards, "CHUNK_SIZE", chunk_size)
    shards = [build_shard(shape, (3, 32 * block), (shape[0] - 5, 32)) for block in blocks]
    barrier, sent = threading.Barrier(3, timeout=60), {}
    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(
                state_shards.init_weights,
                [shard],
                specs,
                config,
                ThreadAxis(rank, 3, barrier, sent),
            )
            for rank, shard in enumerate(shards)
        ]:
            done.result()
    full = compute_initial_values(specs[NAME], config.model, config.run.seed, (0, 0), shape)
    for shard, block in zip(shards, blocks, strict=True):
        expected = full[3:-2, 32 * block : 32 * block + 32]
        assert torch.equal(shard.tensor, torch.from_numpy(expected))
    assert sum(num_sampled) == (shape[0] - 5) * 96


def test_nothing_is_sampled_while_graphs_are_extracted(monkeypatch, config) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    monkeypatch.setattr(state_shards, "compute_initial_values", None)
    specs = {spec.name: spec for spec in list_parameter_specs(config.model)}
    shard = build_shard(specs[NAME].shape, (0, 0), specs[NAME].shape)
    state_shards.init_weights([shard], specs, config, ThreadAxis(0, 1, threading.Barrier(1), {}))
    assert not shard.tensor.any()
