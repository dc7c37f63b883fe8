"""The one place that knows how the coalesced parameters of llama.py hold the canonical ones.

Checkpoints, initial values, export and every test against another implementation speak canonical
names; the forward pass wants few, large matrices. A view maps one to the other without a copy, so
reading and writing use the same mapping and cannot disagree.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hlat.config.model import Model
from hlat.model.llama import gate_up_block


def canonical_views(model: Model, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each canonical parameter as a view into the tensors that hold it.

    Args:
        model: Shape of the model.
        tensors: By parameter name of llama.Llama: the parameters, or tensors of the same shapes
            such as their gradients or moments, whole or cut along dimension 0 between groups (a
            tensor-parallel shard), for the whole model or some of its layers.

    Yields:
        Canonical name and a view. The view's elements in row-major order are those of the canonical
        tensor (or of its shard): `view.reshape(shape)` reads it,
        `view.copy_(canonical.view(view.shape))` writes it.
    """
    for name, tensor in tensors.items():
        if name.endswith(".self_attn.qkv_proj.weight"):
            yield from _qkv(model, _canonical(name), tensor)
        elif name.endswith(".mlp.gate_up_proj.weight"):
            yield from _gate_up(model, _canonical(name), tensor)
        else:
            yield _canonical(name), tensor


def _canonical(name: str) -> str:
    """Hugging Face's name: all but the head stand inside `model`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _qkv(model: Model, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Rows are, for each group: its query heads, its key head, its value head."""
    queries = model.queries_per_group
    groups = torch.unflatten(tensor, 0, (-1, queries + 2, model.head_dim))
    yield name.replace("qkv_proj", "q_proj"), groups[:, :queries]
    yield name.replace("qkv_proj", "k_proj"), groups[:, queries]
    yield name.replace("qkv_proj", "v_proj"), groups[:, queries + 1]


def _gate_up(model: Model, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Rows are, in turn: a block of gates, the block of their ups."""
    blocks = torch.unflatten(tensor, 0, (-1, 2, gate_up_block(model)))
    yield name.replace("gate_up_proj", "gate_proj"), blocks[:, 0]
    yield name.replace("gate_up_proj", "up_proj"), blocks[:, 1]
