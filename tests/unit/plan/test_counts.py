"""Parameters and FLOPs of the planner against the counts of torch."""

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import compute_flops_per_token, count_parameters
from hlat.plan.pipeline_stage_shards import build_stage_shards
from tests.support.planned_stages import count_flops


@pytest.mark.parametrize("choice", ["tiny", "160m", "7b", "70b"])
def test_parameters_equal_those_of_torch(choice, compose):
    model = OmegaConf.to_object(compose(f"model={choice}")).model
    with torch.device("meta"):
        count = sum(weight.numel() for weight in Decoder(model).parameters())
    assert count_parameters(model) == count
    assert sum(stage.numel for stage in build_stage_shards(model, ParallelDegrees(pp=4))) == count


def test_stages_of_dense_and_sparse_layers_equal_those_of_torch(compose):
    """Layers 0, 1, 2 and 4 are dense; stages 0 and 1 of three have two layers each, the last one."""
    settings = ["model.mlp.kind=moe", "model.mlp.moe.every=2", "model.mlp.moe.num_dense_layers=2"]
    model = OmegaConf.to_object(compose(*settings, "model.num_layers=5")).model
    with torch.device("meta"):
        decoder = Decoder(model)
    numels = [sum(one.numel() for one in layer.parameters()) for layer in decoder.layers.values()]
    stages = build_stage_shards(model, ParallelDegrees(pp=3))
    assert [stage.layers for stage in stages] == [((0, 2),), ((0, 1), (3, 1)), ((0, 1),)]
    assert [stage.layer_numels for stage in stages] == [
        *(tuple(numels[:2]), tuple(numels[2:4]), tuple(numels[4:])),
    ]
    assert numels[3] > 3 * numels[0]
    assert stages[1].largest_pair_numel == numels[2] + numels[3]
    assert sum(stage.numel for stage in stages) == count_parameters(model)
    assert sum(stage.matrix_share for stage in stages) == pytest.approx(1)
    assert [stage.num_regions for stage in stages] == [4, 4, 2]
    for stage in stages:
        assert sum(numel for _, numel in stage.numels_by_role) == stage.numel
    # Four stages of 1, 1, 2 and 1 layers: the first rank has layers 0, 2 and 3
    two = build_stage_shards(model, ParallelDegrees(pp=2), stages_per_rank=2)
    assert [stage.layer_numels for stage in two] == [
        (numels[0], numels[2], numels[3]),
        (numels[1], numels[4]),
    ]


@pytest.mark.parametrize("choice", ["tiny", "7b"])
def test_flops_equal_those_of_torch(choice, compose, monkeypatch):
    """Subtract the masked half of causal attention, which torch counts."""
    config = OmegaConf.to_object(compose(f"model={choice}", "parallelism=single"))
    config.batch.micro_batch_size = 1
    config.batch.sequence_length = length = 256
    # The meta device has no fused attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", _attention)
    with torch.device("meta"):
        model = Decoder(config.model)
        tokens = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.compute_logits(tokens).sum().backward()
    masked = 6 * length * config.model.hidden_size * config.model.num_layers * length
    planned = count_flops(
        config, ParallelDegrees(), build_stage_shards(config.model, ParallelDegrees())[0]
    )
    assert counter.get_total_flops() - masked == planned
    assert planned == length * compute_flops_per_token(config.model, length)


def _attention(q, k, v, is_causal, enable_gqa, scale):
    assert is_causal
    copies = q.shape[1] // k.shape[1] if enable_gqa else 1
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v
