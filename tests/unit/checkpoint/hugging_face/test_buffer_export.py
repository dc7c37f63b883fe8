"""Buffers that files of Hugging Face cannot contain."""

import dataclasses
import re

import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.hugging_face.weight_export import validate_buffers
from hlat.config.config_errors import ConfigError
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder_spec import list_buffer_specs
from hlat.model.mlp_spec import MLPConfig, MoEConfig
from tests.unit.model.test_moe import MODEL


def test_a_bias_that_is_not_zero_is_refused(tmp_path) -> None:
    moe = MoEConfig(num_experts=5, experts_per_token=2, bias_update_rate=0.1)
    model = dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe), family="mixtral")
    biases = {spec.name: torch.zeros(spec.shape) for spec in list_buffer_specs(model)}
    shards = [
        StateShard(f"buffers/{name}", (5,), (0,), (5,), tensor) for name, tensor in biases.items()
    ]
    path = checkpoint_store.save_checkpoint(tmp_path, 1, shards, {})
    validate_buffers(path, model)
    biases["model.layers.1.mlp.gate.e_score_correction_bias"][3] = -0.1
    path = checkpoint_store.save_checkpoint(tmp_path, 2, shards, {})
    message = (
        f"model.layers.1.mlp.gate.e_score_correction_bias in {path} differs from 0, and "
        "model.family=mixtral has no name for it; evaluate the checkpoint with hlat, or train "
        "without model.mlp.moe.bias_update_rate"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_buffers(path, model)
    validate_buffers(path, MODEL)
