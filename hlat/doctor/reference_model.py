"""Reference implementation of a Llama decoder in fp64 on one process.

It shares no code with the implementation under test: not hlat.model, its layout of weights,
or torch's attention. It is slow and uses canonical weights. Tensor names end with dimensions, as
in hlat/model/llama.py.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.model import ModelConfig

WeightArrays = Mapping[str, NDArray[np.float32]]
"""Full parameters by canonical name."""


def compute_gradients(
    model: ModelConfig, weights: WeightArrays, tokens: NDArray[np.int32], num_target_tokens: int
) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Return the loss of sequences that are part of a batch, and the gradient of each weight.

    `tokens` are [n, S], each row a single document. The summed cross-entropy is divided by
    `num_target_tokens`, the target tokens of the batch.
    """
    leaves = {name: torch.from_numpy(w).double().requires_grad_() for name, w in weights.items()}
    loss = compute_loss_sum(model, leaves, tokens) / num_target_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in leaves.items()
    }
    return loss.item(), gradients


def compute_mean_loss(
    model: ModelConfig, weights: WeightArrays, tokens: NDArray[np.int32], shift: int = 1
) -> float:
    """Return the mean cross-entropy in nats of sequences [n, S] with labels shifted by `shift`."""
    leaves = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    num_target_tokens = tokens.shape[0] * (tokens.shape[1] - shift)
    with torch.no_grad():
        loss = compute_loss_sum(model, leaves, tokens, shift) / num_target_tokens
    return float(loss)


def compute_loss_sum(
    model: ModelConfig, weights: Mapping[str, Tensor], tokens: NDArray[np.int32], shift: int = 1
) -> Tensor:
    """Return the summed cross-entropy of sequences [n, S] with labels shifted by `shift`."""
    tokens_BS = torch.from_numpy(tokens).long()
    log_BSV = torch.log_softmax(compute_logits(model, weights, tokens_BS), -1)
    length = tokens_BS.shape[1]
    return -log_BSV[:, : length - shift].gather(2, tokens_BS[:, shift:].unsqueeze(2)).sum()


def compute_logits(model: ModelConfig, weights: Mapping[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """Return the logits of the token after each position, [B, S, V]."""
    x_BSH = weights["model.embed_tokens.weight"][tokens_BS]
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        block = {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        x_BSH = x_BSH + _attention(model, block, _rms_norm(model, x_BSH, block["input_layernorm"]))
        y_BSH = _rms_norm(model, x_BSH, block["post_attention_layernorm"])
        gate_BSI, up_BSI = y_BSH @ block["mlp.gate_proj"].T, y_BSH @ block["mlp.up_proj"].T
        x_BSH = x_BSH + (gate_BSI * torch.sigmoid(gate_BSI) * up_BSI) @ block["mlp.down_proj"].T
    head_VH = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _rms_norm(model, x_BSH, weights["model.norm.weight"]) @ head_VH.T


def _rms_norm(model: ModelConfig, x_BSH: Tensor, weight_H: Tensor) -> Tensor:
    mean_BS1 = (x_BSH * x_BSH).mean(-1, keepdim=True)
    return x_BSH / torch.sqrt(mean_BS1 + model.rms_norm_eps) * weight_H


def _attention(model: ModelConfig, weights: Mapping[str, Tensor], x_BSH: Tensor) -> Tensor:
    def project(name: str) -> Tensor:
        y_BSE = x_BSH @ weights[f"self_attn.{name}"].T
        return torch.unflatten(y_BSE, -1, (-1, model.head_dim)).transpose(1, 2)

    length, num_groups = x_BSH.shape[1], model.num_key_value_groups
    q_BNSD, k_BGSD = (_apply_rope(model, project(name)) for name in ("q_proj", "k_proj"))
    k_BNSD, v_BNSD = (y.repeat_interleave(num_groups, 1) for y in (k_BGSD, project("v_proj")))
    scores_BNSS = q_BNSD @ k_BNSD.transpose(2, 3) / math.sqrt(model.head_dim)
    future_SS = torch.arange(length) > torch.arange(length).unsqueeze(1)
    y_BNSD = scores_BNSS.masked_fill(future_SS, -torch.inf).softmax(-1) @ v_BNSD
    return y_BNSD.transpose(1, 2).flatten(2) @ weights["self_attn.o_proj"].T


def _apply_rope(model: ModelConfig, x_BNSD: Tensor) -> Tensor:
    """Apply rotary embeddings (arXiv 2104.09864) by multiplying complex numbers."""
    half = model.head_dim // 2
    frequencies_D = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles_SD = torch.arange(x_BNSD.shape[2]).unsqueeze(1) * frequencies_D
    z_BNSD = torch.complex(x_BNSD[..., :half], x_BNSD[..., half:])
    z_BNSD = z_BNSD * torch.polar(torch.ones_like(angles_SD), angles_SD)
    return torch.cat((z_BNSD.real, z_BNSD.imag), -1)
