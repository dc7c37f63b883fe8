"""Rotary position embedding (arXiv 2104.09864) and the scaling of its frequencies (rope_scaling).

Tensor names end in their dimensions as in decoder.py; E are half of the elements that rotate.
"""

import math

import torch
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.model.autograd_functions import rotate
from hlat.model.rope_spec import RopeConfig, RopeScaling, get_rotary_dim

RopeCosSin = tuple[Tensor, Tensor]
"""cos_SD and sin_SD of the elements of a head that rotate."""


def compute_rope_cos_sin(
    model: ModelConfig,
    positions_S: Tensor,
    dtype: torch.dtype,
    is_sliding: bool = False,
    angle_dtype: torch.dtype = torch.float32,
) -> RopeCosSin:
    """Return cos_SD and sin_SD of sliding or other layers.

    Elements i and i + D/2 of a head rotate by position / theta^(2 i / D), the order of Hugging
    Face. Angles are computed in `angle_dtype`, fp32 under the name that the compiler requires.
    """
    rope, theta, dim = model.rope, model.rope_theta, get_rotary_dim(model)
    scaling = rope.scaling
    if is_sliding and rope.sliding_theta is not None:
        theta, scaling = rope.sliding_theta, RopeScaling.none
    exponents_E = torch.arange(0, dim, 2, device=positions_S.device).to(angle_dtype) / dim
    if scaling is RopeScaling.dynamic:
        frequencies_E = _compute_dynamic_frequencies(rope, theta, dim, exponents_E, positions_S)
    else:
        frequencies_E = 1.0 / theta**exponents_E
    if scaling is RopeScaling.linear:
        frequencies_E = frequencies_E / rope.factor
    elif scaling is RopeScaling.llama3:
        frequencies_E = _scale_llama3(rope, frequencies_E)
    elif scaling is RopeScaling.yarn:
        frequencies_E = _scale_yarn(rope, theta, dim, frequencies_E)
    angles = positions_S.to(angle_dtype).unsqueeze(-1) * frequencies_E
    angles_SD = torch.cat((angles, angles), dim=-1)
    factor = _compute_attention_factor(rope) if scaling is RopeScaling.yarn else 1.0
    if factor == 1.0:
        return angles_SD.cos().to(dtype), angles_SD.sin().to(dtype)
    return (angles_SD.cos() * factor).to(dtype), (angles_SD.sin() * factor).to(dtype)


def apply_rotary_emb(x_BSND: Tensor, cos_sin: RopeCosSin) -> Tensor:
    """Rotate each head by its position; elements beyond those of cos and sin do not rotate."""
    cos_SD, sin_SD = cos_sin
    dim = cos_SD.shape[-1]
    if dim < x_BSND.shape[-1]:
        rotary, rest = x_BSND[..., :dim], x_BSND[..., dim:]
        return torch.cat((apply_rotary_emb(rotary, cos_sin), rest), dim=-1)
    return rotate(x_BSND, cos_SD, sin_SD)


def _compute_dynamic_frequencies(
    rope: RopeConfig, theta: float, dim: int, exponents_E: Tensor, positions_S: Tensor
) -> Tensor:
    """Raise the base with the number of positions, as transformers does (NTK-aware scaling)."""
    original = rope.original_max_positions or 1
    length = (positions_S.max() + 1).clamp(min=original).to(exponents_E.dtype)
    growth = rope.factor * length / original - (rope.factor - 1)
    return 1.0 / (theta * growth ** (dim / (dim - 2))) ** exponents_E


def _scale_llama3(rope: RopeConfig, frequencies_E: Tensor) -> Tensor:
    """Divide low frequencies by the factor (llama-models, models/llama3/model.py)."""
    original = rope.original_max_positions or 1
    wavelengths_E = 2 * math.pi / frequencies_E
    width = rope.high_freq_factor - rope.low_freq_factor
    smooth_E = (original / wavelengths_E - rope.low_freq_factor) / width
    smooth_E = smooth_E.clamp(0, 1)
    return (1 - smooth_E) * frequencies_E / rope.factor + smooth_E * frequencies_E


def _scale_yarn(rope: RopeConfig, theta: float, dim: int, frequencies_E: Tensor) -> Tensor:
    """Interpolate the frequencies of dimensions with few rotations (arXiv 2309.00071, 3.2)."""
    original = rope.original_max_positions or 1

    def find_dimension(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = find_dimension(rope.beta_fast), find_dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    index_E = torch.arange(dim // 2, device=frequencies_E.device).to(frequencies_E.dtype)
    interpolated_E = ((index_E - low) / width).clamp(0, 1)
    return frequencies_E / rope.factor * interpolated_E + frequencies_E * (1 - interpolated_E)


def _compute_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
