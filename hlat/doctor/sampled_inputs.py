"""Random weights, optimizer states, tokens and documents of the checks, the same on all ranks.

Every part of the model affects the loss, and all values are representable in bf16.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlat.config.model import ModelConfig
from hlat.config.run import Config
from hlat.doctor.reference_model import DocumentMasks
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.parameter_spec import Initialization, ParameterRole, ParameterSpec
from hlat.optim.optimizer_spec import (
    StateTensor,
    compute_saved_shapes,
    get_optimizer_spec,
)

FullTensors = dict[str, NDArray[np.float32]]
"""Full tensors by canonical name; empty on ranks other than 0."""
StateTensors = dict[str, FullTensors]
_GRADIENT = 2.0**-10
"""Standard deviation of the gradients of which sampled optimizer states are averages."""
_AVERAGE_SEED = 100
"""Seed of sampled averages of the weights."""


def sample_weights(config: Config, seed: int = 0) -> FullTensors:
    """Return random weights with which every part of the model affects the loss.

    With initial weights, attention is close to uniform and logits are close to zero, so many errors
    would change only the last digits. All values are representable in bf16, so no recipe rounds
    them.
    """
    return {
        spec.name: _sample_weight(config, spec, seed) for spec in list_parameter_specs(config.model)
    }


def sample_optimizer_state(
    config: Config, gradient_rms: Mapping[str, float] | None = None
) -> StateTensors:
    """Return a random optimizer state; all values are representable in bf16.

    `gradient_rms` is the root mean square of the gradients of matrices that are updated as a whole.
    In other parameters, half of the elements have the size of epsilon.
    """
    optimizer = get_optimizer_spec(config.optimizer.name)
    state: StateTensors = {name: {} for name in list_state_keys(config)}
    for spec in list_parameter_specs(config.model):
        generator = np.random.default_rng([config.run.seed, zlib.crc32(spec.name.encode()), 1])
        scale: Any = (gradient_rms or {}).get(spec.name, _GRADIENT)
        if optimizer.is_elementwise(spec.role):
            scale = np.where(generator.random(spec.shape) < 0.5, _GRADIENT, config.optimizer.eps)
        shapes = compute_saved_shapes(config.optimizer, spec.role, spec.shape)
        for index, (tensor, shape) in enumerate(shapes.items()):
            if tensor.is_weights:
                values: NDArray[Any] = _sample_weight(config, spec, _AVERAGE_SEED + index)
            else:
                values = _sample_state_tensor(generator, tensor, shape, scale)
            state[tensor.name][spec.name] = round_to_bf16(values.astype(np.float32))
    return state


def list_state_keys(config: Config) -> list[str]:
    """Return the names of the state tensors of all parameters."""
    shapes = (
        compute_saved_shapes(config.optimizer, spec.role, spec.shape)
        for spec in list_parameter_specs(config.model)
    )
    return [*dict.fromkeys(tensor.name for of_parameter in shapes for tensor in of_parameter)]


def _sample_state_tensor(
    generator: np.random.Generator, tensor: StateTensor, shape: tuple[int, ...], scale: Any
) -> NDArray[Any]:
    """Return random values of a state tensor, given the size of the gradients."""
    if tensor.is_squared:
        squares: NDArray[Any] = scale**2 * generator.uniform(0.5, 2, shape)
        return squares
    values = generator.standard_normal(shape)
    if tensor.is_basis:
        return _sample_basis(len(values))
    if tensor.is_gram:
        gram: NDArray[Any] = scale**2 * _build_gram(values)
        return gram
    scaled: NDArray[Any] = scale * values
    return scaled


def _sample_basis(size: int) -> NDArray[Any]:
    """Return a random orthonormal basis, the same for all tensors of a size."""
    return np.linalg.qr(np.random.default_rng(size).standard_normal((size, size)))[0]


def _build_gram(values: NDArray[Any]) -> NDArray[Any]:
    """Return a matrix of full rank that is nearly diagonal in the sampled basis.

    Its diagonal elements there order the basis. A gradient adds less than their distances, so that
    rounding errors do not change the order.
    """
    size, basis = len(values), _sample_basis(len(values))
    diagonal = basis @ np.diag(np.arange(1.0, size + 1)) @ basis.T
    gram: NDArray[Any] = size * diagonal + values @ values.T
    return gram


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to the nearest values of bf16."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def remove_gradients(config: Config, weights: FullTensors) -> FullTensors:
    """Return the weights with a head and a final norm of zero, for which every gradient is zero.

    The hidden states and the gradient with respect to them are then zero.
    """
    head = "model.embed_tokens.weight" if config.model.tie_embeddings else "lm_head.weight"
    removed = weights | {head: np.zeros_like(weights[head])}
    offset = np.float32(config.model.norm.zero_centered)
    for spec in _list_final_norm(config.model):
        removed[spec.name] = np.full_like(weights[spec.name], -offset)
    return removed


def bypass_layers(config: Config, weights: FullTensors) -> FullTensors:
    """Return the weights without the output of attention and MLP, and an initial final norm."""
    specs = list_parameter_specs(config.model)
    outputs = {_get_module(spec) for spec in specs if spec.role is ParameterRole.residual}
    bypassed = dict(weights)
    for spec in specs:
        if _get_module(spec) in outputs:
            bypassed[spec.name] = np.zeros_like(weights[spec.name])
    for spec in _list_final_norm(config.model):
        value = np.float32(spec.init is Initialization.ones)
        bypassed[spec.name] = np.full_like(weights[spec.name], value)
    return bypassed


def _list_final_norm(model: ModelConfig) -> list[ParameterSpec]:
    return [spec for spec in list_parameter_specs(model) if _get_module(spec) == "model.norm"]


def _get_module(spec: ParameterSpec) -> str:
    """Return the name of the module that has the parameter."""
    return spec.name.rpartition(".")[0]


def sample_batch(config: Config, seed: int = 0) -> NDArray[np.int32]:
    """Return a global batch of random tokens."""
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    generator = np.random.default_rng([config.run.seed, seed])
    return generator.integers(0, config.model.vocab_size, size, np.int32)


def sample_documents(config: Config, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the document of each token of a global batch [n, S].

    Rows have one, four and seven documents in turn, so that data-parallel ranks and micro batches
    have different numbers of targets under data.loss_mask.
    """
    generator = np.random.default_rng([config.run.seed, tokens.shape[1]])
    is_start = np.zeros(tokens.shape, np.int32)
    for row, starts in enumerate(is_start):
        starts[1 + generator.permutation(tokens.shape[1] - 1)[: 3 * (row % 3)]] = 1
    return np.cumsum(is_start, 1, dtype=np.int32)


def build_masks(config: Config, documents: NDArray[np.int32]) -> DocumentMasks:
    """Return the masks that the run applies, given the document of each token."""
    data = config.data
    return DocumentMasks(
        documents if data.document_mask else None, documents if data.loss_mask else None
    )


def _sample_weight(config: Config, spec: ParameterSpec, seed: int) -> NDArray[np.float32]:
    generator = np.random.default_rng([config.run.seed, seed, zlib.crc32(spec.name.encode())])
    values = generator.standard_normal(spec.shape, np.float32)
    is_embedding = spec.role is ParameterRole.embedding and not config.model.tie_embeddings
    if len(spec.shape) == 2 and not is_embedding:
        values /= np.float32(math.sqrt(spec.shape[1]))
    elif len(spec.shape) == 1:
        values /= np.float32(4)
        values += np.float32(spec.init is Initialization.ones)
    return round_to_bf16(values)
