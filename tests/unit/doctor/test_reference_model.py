"""The textbook's decoder is the one of transformers, in value and gradient."""

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.config.resolve import resolve_config
from hlat.doctor import reference_model
from hlat.doctor.engine_harness import sample_batch, sample_weights
from hlat.doctor.reduced_config import reduce_config
from hlat.model import hugging_face_config

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=[[], ["model.tie_embeddings=true"], ["model.num_key_value_heads=1"]])
def config(request, compose):
    return reduce_config(resolve_config(compose(*request.param)))


def _peer(config, weights):
    settings = hugging_face_config.build_hf_config(config.model, 32, 0, Dtype.fp32)
    settings |= {"attn_implementation": "eager"}
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings)).double()
    tensors = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    peer.load_state_dict(tensors, strict=not config.model.tie_embeddings)
    return peer


def test_loss_and_gradients_are_those_of_transformers(config) -> None:
    weights, tokens = sample_weights(config), sample_batch(config)
    peer = _peer(config, weights)
    labels = torch.from_numpy(tokens).long()
    logits = peer(input_ids=labels).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    expected.backward()
    counted = tokens.shape[0] * (tokens.shape[1] - 1)
    loss, gradients = reference_model.compute_gradients(config.model, weights, tokens, counted)
    # transformers computes norms and the angles of the rotary embedding in fp32
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert reference_model.compute_mean_loss(config.model, weights, tokens) == pytest.approx(
        loss, rel=1e-12
    )
    theirs = dict(peer.named_parameters())
    for name, gradient in gradients.items():
        gap = np.linalg.norm(gradient - theirs[name].grad.numpy())
        assert gap <= 1e-5 * np.linalg.norm(gradient), name


def test_weights_are_lively_values_of_bf16(config) -> None:
    for name, weight in sample_weights(config).items():
        assert np.array_equal(torch.from_numpy(weight).bfloat16().float().numpy(), weight), name
        assert weight.std() > 0.05, name


def test_another_seed_gives_other_weights_and_tokens(config) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(sample_weights(config, 0)[name], sample_weights(config, 1)[name])
    assert not np.array_equal(sample_batch(config, 0), sample_batch(config, 1))
