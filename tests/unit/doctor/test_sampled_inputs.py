"""Sampled weights and tokens are values of bf16, and every part of a model affects the loss."""

import numpy as np
import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.doctor.reduced_config import reduce_config
from hlat.doctor.reference_model import compute_gradients
from hlat.doctor.sampled_inputs import (
    remove_gradients,
    sample_batch,
    sample_documents,
    sample_weights,
)


@pytest.fixture(params=["model.tie_embeddings=false", "model.tie_embeddings=true"])
def config(request, compose):
    return reduce_config(resolve_config(compose(request.param)))


def test_weights_are_values_of_bf16_that_affect_the_loss(config) -> None:
    for name, weight in sample_weights(config).items():
        assert np.array_equal(torch.from_numpy(weight).bfloat16().float().numpy(), weight), name
        assert weight.std() > 0.05, name


def test_another_seed_gives_other_weights_and_tokens(config) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(sample_weights(config, 0)[name], sample_weights(config, 1)[name])
    assert not np.array_equal(sample_batch(config, 0), sample_batch(config, 1))


def test_shards_and_micro_batches_have_different_numbers_of_documents(config) -> None:
    tokens = np.zeros((8, config.batch.sequence_length), np.int32)
    documents = sample_documents(config, tokens)
    assert documents[:, -1].tolist() == [0, 3, 6, 0, 3, 6, 0, 3]
    assert (documents[:, 0] == 0).all()
    shards = [documents[rank::2, -1].sum() for rank in range(2)]
    assert shards[0] != shards[1]


def test_weights_without_gradient_have_none(config) -> None:
    weights = remove_gradients(config, sample_weights(config))
    tokens = sample_batch(config)
    _, gradients = compute_gradients(config.model, weights, tokens, tokens.size)
    assert all(not gradient.any() for gradient in gradients.values())
