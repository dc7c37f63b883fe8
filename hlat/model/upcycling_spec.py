"""Initial weights of a mixture of experts from those of a dense model, without torch.

Sparse upcycling (arXiv 2212.05055): each expert starts as a copy of the dense network, and the
other parameters are those of the dense model. Narrower experts are slices of the dense network, and
the experts with all slices form a virtual group of equal router rows (arXiv 2410.07524), so that
the router selects whole groups. The outputs of the first step are those of the dense model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hlat.model.mlp_spec import MoEConfig, RouterScoring
from hlat.model.moe_spec import get_expert_size
from hlat.model.parameter_spec import ParameterRole, ParameterSpec, ShardingRule

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

_KEY = "model.mlp.moe"
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class DenseSlice:
    """Slice of a dense parameter with the initial values of a parameter.

    Attributes:
        name: Canonical name of the dense parameter.
        offset: Index of the first element.
        factor: Factor of the values.
        has_noise: True for the weights of an expert.
    """

    name: str
    offset: tuple[int, ...]
    factor: float = 1.0
    has_noise: bool = False


def is_upcycled(model: ModelConfig) -> bool:
    """Return True if the initial weights are those of a dense model."""
    return model.mlp.kind == "moe" and model.mlp.moe.upcycling_noise is not None


def build_dense_model(model: ModelConfig, family: str) -> ModelConfig:
    """Return the dense model of a family from which a mixture of experts can start."""
    return replace(model, family=family, mlp=replace(model.mlp, kind="dense", moe=MoEConfig()))


def compute_group_size(model: ModelConfig) -> int:
    """Return the number of experts into which the dense network is split, 1 for whole copies."""
    return model.intermediate_size // get_expert_size(model)


def find_dense_slice(model: ModelConfig, parameter: ParameterSpec) -> DenseSlice | None:
    """Return the slice with the initial values of a parameter; None for a router.

    Weights of the selected experts have the sum `routed_scale`, and those of a virtual group are
    equal. The factor of down_proj therefore is the size of a group divided by `routed_scale`.
    """
    if parameter.role is ParameterRole.router:
        return None
    match = _EXPERT.search(parameter.name)
    if match is None:
        return DenseSlice(parameter.name, (0,) * len(parameter.shape))
    name, group_size = get_dense_name(parameter.name), compute_group_size(model)
    start = int(match[1]) % group_size * get_expert_size(model)
    if parameter.sharding is ShardingRule.row:
        factor = group_size / model.mlp.moe.routed_scale
        return DenseSlice(name, (0, start), factor, has_noise=True)
    return DenseSlice(name, (start, 0), has_noise=True)


def get_dense_name(name: str) -> str:
    """Return the canonical name of a parameter in the dense model."""
    return _EXPERT.sub(".mlp.", name)


def find_upcycling_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each setting with which the outputs would not be the dense model's."""
    if not is_upcycled(model):
        return
    moe = model.mlp.moe
    setting = f"{_KEY}.upcycling_noise={moe.upcycling_noise:g}"
    if model.init_from is None:
        yield (
            f"{setting} has no effect without model.init_from; set model.init_from to the "
            f"directory of a dense model, or {_KEY}.upcycling_noise=null"
        )
    selects_all = moe.experts_per_token == moe.num_experts
    if not moe.normalize_top_k and not (selects_all and moe.scoring is RouterScoring.softmax):
        yield (
            f"{_KEY}.normalize_top_k=false and {setting}: the weights of the selected experts have "
            "another sum for each token, so that the outputs differ from those of the dense model; "
            f"set {_KEY}.normalize_top_k=true"
        )
    if moe.shared_size is not None:
        yield (
            f"{_KEY}.shared_size={moe.shared_size} and {setting}: the dense model has no shared "
            f"network, whose output would be added; set {_KEY}.shared_size=null"
        )
    if min(model.intermediate_size, moe.intermediate_size or 1, moe.num_groups) >= 1:
        yield from _find_size_problems(model)


def _find_size_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each number of experts that is not a multiple of a virtual group."""
    moe, size = model.mlp.moe, get_expert_size(model)
    widths = f"model.intermediate_size={model.intermediate_size}"
    if model.intermediate_size % size:
        yield (
            f"{_KEY}.intermediate_size={size} does not divide {widths}, the width of the dense "
            f"network; use a divisor, or {_KEY}.intermediate_size=null for whole copies"
        )
        return
    group_size = compute_group_size(model)
    split = (
        f"the experts of {_KEY}.intermediate_size={size} into which the dense network of {widths} "
        "is split"
    )
    if moe.experts_per_token % group_size:
        yield (
            f"{_KEY}.experts_per_token={moe.experts_per_token} is not a multiple of {group_size}, "
            f"{split}; use a multiple of {group_size}"
        )
    if moe.num_experts // moe.num_groups % group_size:
        groups = f" in {_KEY}.num_groups={moe.num_groups} groups" if moe.num_groups > 1 else ""
        multiple = f"a multiple of {group_size}{' in each group' if groups else ''}"
        yield (
            f"{_KEY}.num_experts={moe.num_experts}{groups} is not {multiple}, {split}; use "
            f"{multiple}"
        )
