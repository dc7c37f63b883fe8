"""Reader of the initial weights of a mixture of experts that starts from a dense model.

Every value depends only on the dense weights, the seed, the canonical name and the index in the
global tensor, so that all parallel layouts start from the same weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.distributed.tensor_slice import TensorSlice
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.parameter_spec import ParameterSpec
from hlat.model.upcycling_spec import compute_group_size, find_dense_slice
from hlat.model.weight_initialization import compute_initial_values, sample_noise

if TYPE_CHECKING:
    from hlat.checkpoint.nxd_weights import NxdWeightReader
    from hlat.checkpoint.safetensors_file import SafetensorsReader


class UpcycledWeightReader:
    """Reader of slices of the parameters of a mixture of experts."""

    def __init__(
        self, dense_weights: NxdWeightReader | SafetensorsReader, model: ModelConfig, seed: int
    ) -> None:
        self._dense_weights, self._model, self._seed = dense_weights, model, seed
        self._specs = {spec.name: spec for spec in list_parameter_specs(model)}

    def has_tensor(self, name: str) -> bool:
        """Return True if the dense model has a tensor."""
        return self._dense_weights.has_tensor(name)

    def read(self, name: str, tensor_slice: TensorSlice) -> Tensor:
        """Return a slice of a parameter; as in the files, or fp32 if values are computed."""
        spec = self._specs.get(name)
        if spec is None:  # a tied output head
            return self._dense_weights.read(name, tensor_slice)
        source = find_dense_slice(self._model, spec)
        if source is None:
            return self._compute_router(spec, tensor_slice)
        offset = tuple(map(int.__add__, source.offset, tensor_slice.offset))
        tensor = self._dense_weights.read(source.name, TensorSlice(offset, tensor_slice.size))
        if source.has_noise and self._model.mlp.moe.upcycling_noise:
            tensor = tensor.float() * self._compute_noise(spec, tensor_slice)
        return tensor if source.factor == 1 else tensor.float() * source.factor

    def _compute_noise(self, spec: ParameterSpec, tensor_slice: TensorSlice) -> Tensor:
        """Return the factors of the weights of an expert."""
        normals = sample_noise(spec, self._seed, tensor_slice.offset, tensor_slice.size)
        noise = self._model.mlp.moe.upcycling_noise
        assert noise is not None
        return 1 + noise * torch.from_numpy(normals)

    def _compute_router(self, spec: ParameterSpec, tensor_slice: TensorSlice) -> Tensor:
        """Return the usual initial values of a router, with equal rows in a virtual group."""
        (first_row, first_column), (num_rows, num_columns) = tensor_slice.offset, tensor_slice.size
        group_size = compute_group_size(self._model)
        groups = np.arange(first_row, first_row + num_rows) // group_size
        first, end = first_row // group_size, -(-(first_row + num_rows) // group_size)
        offset, size = (first, first_column), (end - first, num_columns)
        values = compute_initial_values(spec, self._model, self._seed, offset, size)
        return torch.from_numpy(values[groups - first])
