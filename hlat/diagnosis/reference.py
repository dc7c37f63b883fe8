"""A Llama decoder and AdamW as a textbook writes them, in fp64, on one process.

It shares no line with what it judges: neither hlat.model's operators nor its layout of weights,
nor torch's attention. It is slow, and reads canonical weights.

Names end in dimensions as in hlat/model/llama.py.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.model import Model

Arrays = Mapping[str, NDArray[np.float32]]
"""Whole parameters by canonical name."""


def gradients(
    model: Model, weights: Arrays, tokens: NDArray[np.int32], num_counted: int
) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Loss of some sequences [n, S] as a part of a batch with `num_counted` targets, by weight.

    Args:
        model: Shape.
        weights: Canonical.
        tokens: Sequences, each one text.
        num_counted: What the sum of the cross-entropies is divided by.
    """
    leaves = {name: torch.from_numpy(w).double().requires_grad_() for name, w in weights.items()}
    loss = summed_loss(model, leaves, tokens) / num_counted
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in leaves.items()
    }
    return loss.item(), grads


def mean_loss(model: Model, weights: Arrays, tokens: NDArray[np.int32], shift: int = 1) -> float:
    """Mean cross-entropy in nats of sequences [n, S] whose positions predict `shift` ahead."""
    leaves = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    counted = tokens.shape[0] * (tokens.shape[1] - shift)
    with torch.no_grad():
        mean: float = (summed_loss(model, leaves, tokens, shift) / counted).item()
    return mean


def summed_loss(
    model: Model, weights: Mapping[str, Tensor], tokens: NDArray[np.int32], shift: int = 1
) -> Tensor:
    """Sum of the cross-entropies of sequences whose positions predict `shift` ahead."""
    tokens_BS = torch.from_numpy(tokens).long()
    log_BSV = torch.log_softmax(logits(model, weights, tokens_BS), -1)
    length = tokens_BS.shape[1]
    picked_BS = log_BSV[:, : length - shift].gather(2, tokens_BS[:, shift:].unsqueeze(2))
    return -picked_BS.sum()


def logits(model: Model, weights: Mapping[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """Logits of the token after each position, [B, S, V]."""
    x_BSH = weights["model.embed_tokens.weight"][tokens_BS]
    for layer in range(model.num_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x_BSH = x_BSH + _attention(model, own, _norm(model, x_BSH, own["input_layernorm"]))
        y_BSH = _norm(model, x_BSH, own["post_attention_layernorm"])
        gate_BSI, up_BSI = y_BSH @ own["mlp.gate_proj"].T, y_BSH @ own["mlp.up_proj"].T
        x_BSH = x_BSH + (gate_BSI * torch.sigmoid(gate_BSI) * up_BSI) @ own["mlp.down_proj"].T
    head_VH = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(model, x_BSH, weights["model.norm.weight"]) @ head_VH.T


def _norm(model: Model, x_BSH: Tensor, weight_H: Tensor) -> Tensor:
    mean_BS1 = (x_BSH * x_BSH).mean(-1, keepdim=True)
    return x_BSH / torch.sqrt(mean_BS1 + model.rms_norm_eps) * weight_H


def _attention(model: Model, weights: Mapping[str, Tensor], x_BSH: Tensor) -> Tensor:
    def heads(name: str) -> Tensor:
        y_BSE = x_BSH @ weights[f"self_attn.{name}"].T
        return torch.unflatten(y_BSE, -1, (-1, model.head_dim)).transpose(1, 2)

    length = x_BSH.shape[1]
    q_BNSD, k_BGSD = (_turned(model, heads(name)) for name in ("q_proj", "k_proj"))
    k_BNSD, v_BNSD = (
        y.repeat_interleave(model.queries_per_group, 1) for y in (k_BGSD, heads("v_proj"))
    )
    scores_BNSS = q_BNSD @ k_BNSD.transpose(2, 3) / math.sqrt(model.head_dim)
    later_SS = torch.arange(length) > torch.arange(length).unsqueeze(1)
    mixed_BNSD = scores_BNSS.masked_fill(later_SS, -torch.inf).softmax(-1) @ v_BNSD
    return mixed_BNSD.transpose(1, 2).flatten(2) @ weights["self_attn.o_proj"].T


def _turned(model: Model, x_BNSD: Tensor) -> Tensor:
    """The rotary embedding (arXiv 2104.09864) as products of complex numbers."""
    half = model.head_dim // 2
    turns_D = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles_SD = torch.arange(x_BNSD.shape[2]).unsqueeze(1) * turns_D
    z_BNSD = torch.complex(x_BNSD[..., :half], x_BNSD[..., half:])
    z_BNSD = z_BNSD * torch.polar(torch.ones_like(angles_SD), angles_SD)
    return torch.cat((z_BNSD.real, z_BNSD.imag), -1)
