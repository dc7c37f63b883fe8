"""The textbook's decoder is the one of transformers, in value and gradient."""

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.config.resolve import resolve
from hlat.diagnosis import reference
from hlat.diagnosis.patient import batch, lively
from hlat.diagnosis.shrink import shrink
from hlat.model import hugging_face

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=[[], ["model.tie_embeddings=true"], ["model.num_key_value_heads=1"]])
def config(request, compose):
    return shrink(resolve(compose(*request.param)))


def _peer(config, weights):
    settings = hugging_face.to_config(config.model, 32, 0, Dtype.fp32)
    settings |= {"attn_implementation": "eager"}
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings)).double()
    tensors = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    peer.load_state_dict(tensors, strict=not config.model.tie_embeddings)
    return peer


def test_loss_and_gradients_are_those_of_transformers(config) -> None:
    weights, tokens = lively(config), batch(config)
    peer = _peer(config, weights)
    labels = torch.from_numpy(tokens).long()
    logits = peer(input_ids=labels).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    expected.backward()
    counted = tokens.shape[0] * (tokens.shape[1] - 1)
    loss, gradients = reference.gradients(config.model, weights, tokens, counted)
    # transformers computes norms and the angles of the rotary embedding in fp32
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert reference.mean_loss(config.model, weights, tokens) == pytest.approx(loss, rel=1e-12)
    theirs = dict(peer.named_parameters())
    for name, gradient in gradients.items():
        gap = np.linalg.norm(gradient - theirs[name].grad.numpy())
        assert gap <= 1e-5 * np.linalg.norm(gradient), name


def test_weights_are_lively_values_of_bf16(config) -> None:
    for name, weight in lively(config).items():
        assert np.array_equal(torch.from_numpy(weight).bfloat16().float().numpy(), weight), name
        assert weight.std() > 0.05, name


def test_another_seed_gives_other_weights_and_tokens(config) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(lively(config, 0)[name], lively(config, 1)[name])
    assert not np.array_equal(batch(config, 0), batch(config, 1))
