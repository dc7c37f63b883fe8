"""Reference implementation of parametrizations, without code of hlat.model or hlat.optim.

The rules are those of EleutherAI/nanoGPT-mup (model.py at 3904404), which implements muP and
CompleteP (arXiv 2505.01618) for AdamW, and for Muon the spectral condition (arXiv 2310.17813). They
are written by name of parameter, as there, and not by role.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hlat.config.model import ModelConfig
from hlat.config.run import Config
from hlat.doctor.reference_optimizer import (
    Array,
    ReferenceState,
    ReferenceUpdate,
    get_width_exponent,
    remove_second_rate,
)

ParameterUpdate = Callable[[str, ReferenceState, Array | float, float], ReferenceState]
"""Returns the state of a named parameter after an update with a gradient and a learning rate."""


@dataclass(frozen=True)
class Multipliers:
    """Factors of the attention scores, the outputs of blocks, and the hidden states of the head."""

    attention: float
    residual: float
    output: float


def compute_multipliers(model: ModelConfig) -> Multipliers:
    """Return the factors of the model."""
    width, depth = _compute_ratios(model)
    attention = model.attention.scale or 1 / math.sqrt(model.head_dim)
    base_dim = model.parametrization.base_head_dim
    if base_dim is not None and base_dim != model.head_dim:
        attention = (model.attention.scale or 1 / math.sqrt(base_dim)) * base_dim / model.head_dim
    return Multipliers(attention, model.residual_multiplier / depth, 1 / width)


def compute_init_std(model: ModelConfig, name: str) -> float:
    """Return the standard deviation of the initial values of a matrix."""
    parts = name.split(".")
    if "self_attn" not in parts and "mlp" not in parts:
        return model.init_std
    layer, projection = parts[parts.index("layers") + 1], parts[-2]
    std = model.init_std / math.sqrt(_compute_ratios(model)[0])
    if projection not in ("o_proj", "down_proj"):
        return std
    num_layers = model.parametrization.base_depth or model.num_layers
    divisors = {"depth": 2 * num_layers, "layer": 2 * (int(layer) + 1)}
    return std / math.sqrt(divisors.get(model.scaled_init.value, 1))


def adapt_update(config: Config, update: ReferenceUpdate) -> ParameterUpdate:
    """Return an update with the learning rate, decay and eps of each parameter."""
    settings, model = config.optimizer, config.model
    width, depth = _compute_ratios(model)

    def update_parameter(
        name: str, state: ReferenceState, gradient: Array | float, learning_rate: float
    ) -> ReferenceState:
        role, own = _find_role(name), settings
        rate = getattr(settings.lr_by_role, role)
        if rate is not None:
            learning_rate *= rate / settings.lr
            own = remove_second_rate(own)
        is_outside = role in ("embedding", "head")
        own = replace(own, eps=own.eps / width / (1 if is_outside else depth))
        if role in ("matrix", "residual", "router"):
            rate_scaling = width ** get_width_exponent(settings, state)
            learning_rate *= rate_scaling
            if model.parametrization.name.value == "completep":
                own = replace(own, weight_decay=own.weight_decay / rate_scaling)
        return update(own, state, gradient, learning_rate)

    return update_parameter


def _compute_ratios(model: ModelConfig) -> tuple[float, float]:
    """Return width and depth over those of the base; 1 and 1 for the standard parametrization."""
    base = model.parametrization
    width = 1.0 if base.base_width is None else model.hidden_size / base.base_width
    depth = 1.0 if base.base_depth is None else model.num_layers / base.base_depth
    return width, depth


def _find_role(name: str) -> str:
    """Return the role of a parameter, given its name in transformers."""
    module, leaf = name.split(".")[-2:]
    if module in ("o_proj", "down_proj") and leaf == "weight":
        return "residual"
    if leaf in ("bias", "sinks"):
        return {"bias": "bias", "sinks": "sink"}[leaf]
    if "norm" in module:
        return "norm"
    roles = {"embed_tokens": "embedding", "lm_head": "head", "gate": "router"}
    return roles.get(module, "matrix")
