"""Reference implementation of the decoder in fp64 on one process.

It shares no code with the implementation under test: not hlat.model, its layout of weights,
or torch's attention. It reads only the settings of ModelConfig. Components of extensions, which
have no second implementation, are those of `extension_reference`. It is slow and uses canonical
weights. Tensor names end with dimensions: B batch, S sequence, H hidden, E all heads together, N
heads, G key/value heads, D elements of a head, I intermediate, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.doctor import extension_reference
from hlat.doctor.reference_parametrization import compute_multipliers
from hlat.doctor.reference_router import (
    ROUTER_BIAS,
    ROUTER_LOAD,
    compute_router_loss,
    drop_tokens,
    route,
    update_router_buffers,
)

WeightArrays = Mapping[str, NDArray[np.float32]]
"""Full parameters by canonical name."""


@dataclass(frozen=True)
class DocumentMasks:
    """Documents of the tokens of sequences, int [n, S], for the two uses of them.

    Attributes:
        attention: Tokens attend to their document only, and positions start at 0 in each; None: a
            row is one document.
        loss: The first token of a document is no target; None: only that of a row is none.
    """

    attention: NDArray[np.int32] | None = None
    loss: NDArray[np.int32] | None = None

    def select_rows(self, rows: NDArray[np.int64]) -> "DocumentMasks":
        """Return the masks of some sequences."""
        attention, loss = self.attention, self.loss
        return DocumentMasks(
            None if attention is None else attention[rows], None if loss is None else loss[rows]
        )


NO_MASKS = DocumentMasks()


def count_targets(tokens: NDArray[np.int32], masks: DocumentMasks) -> int:
    """Return the number of tokens of sequences [n, S] in the loss."""
    num_starts = 0 if masks.loss is None else int(np.count_nonzero(np.diff(masks.loss)))
    num_sequences, length = tokens.shape
    return int(num_sequences * (length - 1) - num_starts)


def compute_gradients(
    model: ModelConfig,
    weights: WeightArrays,
    tokens: NDArray[np.int32],
    num_target_tokens: int,
    masks: DocumentMasks = NO_MASKS,
) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Return the loss of sequences that are part of a batch, and the gradient of each weight.

    The summed cross-entropy of the sequences, [n, S], is divided by `num_target_tokens`, the target
    tokens of the batch. The gradients include that of the z-loss.
    """
    leaves = {name: torch.from_numpy(w).double().requires_grad_() for name, w in weights.items()}
    loss, objective = compute_loss_sums(model, leaves, tokens, masks)
    (objective / num_target_tokens).backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in leaves.items()
    }
    return loss.item() / num_target_tokens, gradients


def compute_mean_loss(
    model: ModelConfig,
    weights: WeightArrays,
    tokens: NDArray[np.int32],
    masks: DocumentMasks = NO_MASKS,
    shift: int = 1,
) -> float:
    """Return the mean cross-entropy in nats of sequences [n, S] with labels shifted by `shift`."""
    nats = compute_nats(model, weights, tokens, masks, shift)
    return float(nats[~np.isnan(nats)].mean())


def compute_training_loss(
    model: ModelConfig, weights: WeightArrays, tokens: NDArray[np.int32], masks: DocumentMasks
) -> float:
    """Return the mean cross-entropy in nats that a training step computes."""
    leaves = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    with torch.no_grad():
        loss, _ = compute_loss_sums(model, leaves, tokens, masks)
    return loss.item() / count_targets(tokens, masks)


def compute_nats(
    model: ModelConfig,
    weights: WeightArrays,
    tokens: NDArray[np.int32],
    masks: DocumentMasks = NO_MASKS,
    shift: int = 1,
) -> NDArray[np.float64]:
    """Return the cross-entropy of each target, [n, S - shift]; NaN where there is none."""
    leaves = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    with torch.no_grad():
        nats, _ = _compute_losses(model, leaves, tokens, masks, shift)
    return nats.masked_fill(~_find_targets(masks, nats), torch.nan).numpy()


def compute_loss_sums(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    tokens: NDArray[np.int32],
    masks: DocumentMasks = NO_MASKS,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of sequences [n, S], and the training objective.

    The objective includes the z-loss, and losses of routers: the mean over the targets of a
    sequence, hence times their number. Buffers of routers in `weights` are updated in place.
    """
    router_losses = list[Tensor]()
    nats, log_z = _compute_losses(model, weights, tokens, masks, 1, router_losses)
    is_target = _find_targets(masks, nats)
    loss = nats[is_target].sum()
    objective = loss + model.head.z_loss * log_z[is_target].square().sum()
    for router_loss in router_losses:
        objective = objective + router_loss.sum() * nats.shape[1]
    return loss, objective


def _compute_losses(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    tokens: NDArray[np.int32],
    masks: DocumentMasks,
    shift: int,
    router_losses: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and log-partition function at each position, [n, S - shift].

    Losses of routers, [n] or their sum, are appended to `router_losses`.
    """
    tokens_BS = torch.from_numpy(tokens).long()
    length = tokens_BS.shape[1]
    logits_BSV = compute_logits(model, weights, tokens_BS, masks.attention, router_losses)
    logits_BSV = logits_BSV[:, : length - shift]
    log_z_BS = logits_BSV.logsumexp(-1)
    target_logits_BS = logits_BSV.gather(2, tokens_BS[:, shift:].unsqueeze(2)).squeeze(2)
    return log_z_BS - target_logits_BS, log_z_BS


def _find_targets(masks: DocumentMasks, nats: Tensor) -> Tensor:
    """Return True for each position of `nats` with a target in the loss."""
    if masks.loss is None:
        return torch.ones_like(nats, dtype=torch.bool)
    return torch.from_numpy(np.diff(masks.loss) == 0)


def compute_logits(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    tokens_BS: Tensor,
    documents: NDArray[np.int32] | None = None,
    router_losses: list[Tensor] | None = None,
) -> Tensor:
    """Return the logits of the token after each position, [B, S, V].

    Given documents, tokens attend to theirs only. Losses of routers, [B] or their sum, are appended
    to `router_losses`.
    """
    embedding_VH = weights["model.embed_tokens.weight"]
    scale = model.embedding.multiplier
    if model.embedding.scale_by_sqrt_hidden:
        scale *= math.sqrt(model.hidden_size)
    x_BSH = embedding_VH[tokens_BS] * scale
    documents_BS = torch.zeros_like(tokens_BS) if documents is None else torch.from_numpy(documents)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        block = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        x_BSH = _compute_layer(model, block, layer, x_BSH, documents_BS, router_losses)
    head_VH = embedding_VH if model.tie_embeddings else weights["lm_head.weight"]
    norm = {name.removeprefix("model."): weight for name, weight in weights.items()}
    hidden_BSH = _norm(model, norm, "norm", x_BSH) * compute_multipliers(model).output
    logits_BSV = hidden_BSH @ head_VH.T
    return _softcap(logits_BSV, model.head.logit_softcap)


def _compute_layer(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    layer: int,
    x_BSH: Tensor,
    documents_BS: Tensor,
    router_losses: list[Tensor] | None,
) -> Tensor:
    """Return the residual stream after attention and MLP of a layer."""

    def attention(y_BSH: Tensor) -> Tensor:
        return _attention(model, weights, layer, y_BSH, documents_BS)

    def mlp(y_BSH: Tensor) -> Tensor:
        return _mlp(model, weights, layer, y_BSH, router_losses)

    def norm(name: str, y_BSH: Tensor) -> Tensor:
        return _norm(model, weights, name, y_BSH)

    scale = compute_multipliers(model).residual
    match model.norm.placement.value:
        case "pre":
            y_BSH = attention(norm("input_layernorm", x_BSH))
            x_BSH = x_BSH + scale * y_BSH
            y_BSH = mlp(norm("post_attention_layernorm", x_BSH))
        case "post":
            y_BSH = attention(x_BSH)
            x_BSH = x_BSH + scale * norm("post_attention_layernorm", y_BSH)
            y_BSH = norm("post_feedforward_layernorm", mlp(x_BSH))
        case "sandwich":
            y_BSH = attention(norm("input_layernorm", x_BSH))
            x_BSH = x_BSH + scale * norm("post_attention_layernorm", y_BSH)
            y_BSH = mlp(norm("pre_feedforward_layernorm", x_BSH))
            y_BSH = norm("post_feedforward_layernorm", y_BSH)
        case placement:
            raise NotImplementedError(f"model.norm.placement={placement}")
    return x_BSH + scale * y_BSH


def _norm(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x_BSH: Tensor) -> Tensor:
    """Apply a norm over the hidden size, given by the name of its module."""
    if extension_reference.is_extended(model, "model.norm"):
        return extension_reference.compute_norm(model, weights, name, x_BSH)
    return _rms_norm(model, x_BSH, weights[f"{name}.weight"])


def _rms_norm(model: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    """Apply RMSNorm over the last dimension."""
    mean = (x * x).mean(-1, keepdim=True)
    return x / torch.sqrt(mean + model.rms_norm_eps) * (weight + model.norm.zero_centered)


def _softcap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _mlp(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    layer: int,
    x_BSH: Tensor,
    router_losses: list[Tensor] | None,
) -> Tensor:
    if extension_reference.is_extended(model, "model.mlp"):
        return extension_reference.compute_mlp(model, weights, layer, x_BSH, router_losses)
    moe = model.mlp.moe
    is_sparse = layer >= moe.num_dense_layers and (layer + 1) % moe.every == 0
    if model.mlp.kind != "moe" or not is_sparse:
        return _network(model, weights, "mlp", x_BSH)
    logits_BSE, bias_E = _linear(weights, "mlp.gate", x_BSH), weights.get(ROUTER_BIAS)
    weights_BSE = route(moe, logits_BSE, bias_E)
    if router_losses is not None:
        load_E = weights.get(ROUTER_LOAD)
        weights_BSE = drop_tokens(moe, weights_BSE)
        router_losses.append(compute_router_loss(moe, logits_BSE, bias_E, load_E))
        update_router_buffers(moe, logits_BSE, bias_E, load_E)
    return _moe(model, weights, x_BSH, weights_BSE)


def _moe(
    model: ModelConfig, weights: Mapping[str, Tensor], x_BSH: Tensor, weights_BSE: Tensor
) -> Tensor:
    """Apply all experts to all tokens; those that the router does not select have weight 0."""
    moe = model.mlp.moe
    outputs_EBSH = [
        weights_BSE[..., [expert]] * _network(model, weights, f"mlp.experts.{expert}", x_BSH)
        for expert in range(moe.num_experts)
    ]
    if moe.shared_size is not None:
        shared_BSH = _network(model, weights, "mlp.shared_expert", x_BSH)
        if moe.shared_gate:
            shared_BSH = shared_BSH * _linear(weights, "mlp.shared_expert_gate", x_BSH).sigmoid()
        outputs_EBSH.append(shared_BSH)
    return torch.stack(outputs_EBSH).sum(0)


def _network(model: ModelConfig, weights: Mapping[str, Tensor], path: str, x_BSH: Tensor) -> Tensor:
    """Apply one feed-forward network, given by the path of its weights."""

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    up_BSI = _linear(weights, f"{path}.up_proj", x_BSH)
    match model.mlp.activation.value:
        case "swiglu":
            gate_BSI = _linear(weights, f"{path}.gate_proj", x_BSH)
            y_BSI = gate_BSI * torch.sigmoid(gate_BSI) * up_BSI
        case "geglu":
            y_BSI = gelu(_linear(weights, f"{path}.gate_proj", x_BSH)) * up_BSI
        case "relu2":
            y_BSI = up_BSI.clamp(min=0) ** 2
        case "gelu":
            y_BSI = gelu(up_BSI)
        case activation:
            raise NotImplementedError(f"model.mlp.activation={activation}")
    return _linear(weights, f"{path}.down_proj", y_BSI)


def _attention(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    layer: int,
    x_BSH: Tensor,
    documents_BS: Tensor,
) -> Tensor:
    if extension_reference.is_extended(model, "model.attention"):
        positions_BS = _compute_positions(documents_BS)
        return extension_reference.compute_attention(
            model, weights, layer, x_BSH, documents_BS, positions_BS
        )
    settings, num_groups = model.attention, model.num_key_value_groups
    q_BNSD, k_BGSD, v_BGSD = (_project(model, weights, name, x_BSH) for name in "qkv")
    positions_BS = _compute_positions(documents_BS)
    q_BNSD, k_BGSD = (_apply_rope(model, layer, y, positions_BS) for y in (q_BNSD, k_BGSD))
    k_BNSD, v_BNSD = (y.repeat_interleave(num_groups, 1) for y in (k_BGSD, v_BGSD))
    scores_BNSS = q_BNSD @ k_BNSD.transpose(2, 3) * compute_multipliers(model).attention
    scores_BNSS = _softcap(scores_BNSS, settings.logit_softcap)
    indices_S = torch.arange(x_BSH.shape[1])
    distances_SS = indices_S.unsqueeze(1) - indices_S
    is_masked_SS = distances_SS < 0
    if is_sliding(model, layer):
        assert settings.sliding_window is not None
        is_masked_SS |= distances_SS >= settings.sliding_window
    is_other_BSS = documents_BS.unsqueeze(2) != documents_BS.unsqueeze(1)
    is_masked_B1SS = (is_masked_SS | is_other_BSS).unsqueeze(1)
    exp_BNSS = scores_BNSS.masked_fill(is_masked_B1SS, -torch.inf).exp()
    sums_BNS1 = exp_BNSS.sum(-1, keepdim=True)
    if settings.sinks:
        sums_BNS1 = sums_BNS1 + weights["self_attn.sinks"].exp().view(1, -1, 1, 1)
    y_BNSD = exp_BNSS / sums_BNS1 @ v_BNSD
    return _linear(weights, "self_attn.o_proj", y_BNSD.transpose(1, 2).flatten(2))


def is_sliding(model: ModelConfig, layer: int) -> bool:
    """Return True if a layer attends to the last sliding_window positions only."""
    settings = model.attention
    if settings.layer_pattern:
        return settings.layer_pattern[layer % len(settings.layer_pattern)].value == "sliding"
    return settings.sliding_window is not None


def _project(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x_BSH: Tensor) -> Tensor:
    """Return queries, keys or values, [B, N, S, D], with QK-norm but not rotated."""
    y_BSE = _linear(weights, f"self_attn.{name}_proj", x_BSH)
    has_norm = model.attention.qk_norm and name != "v"
    scope = model.attention.qk_norm_scope.value if has_norm else "none"
    if scope == "projection":
        y_BSE = _rms_norm(model, y_BSE, weights[f"self_attn.{name}_norm.weight"])
    y_BSND = torch.unflatten(y_BSE, -1, (-1, model.head_dim))
    if scope == "head":
        y_BSND = _rms_norm(model, y_BSND, weights[f"self_attn.{name}_norm.weight"])
    return y_BSND.transpose(1, 2)


def _compute_positions(documents_BS: Tensor) -> Tensor:
    """Return the number of earlier tokens of the document of each token."""
    is_same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    return is_same_BSS.tril(-1).sum(2)


def _apply_rope(model: ModelConfig, layer: int, x_BNSD: Tensor, positions_BS: Tensor) -> Tensor:
    """Apply rotary embeddings (arXiv 2104.09864) by multiplying complex numbers."""
    pattern, length = model.rope.layer_pattern, int(positions_BS.max()) + 1
    if pattern and not pattern[layer % len(pattern)]:
        return x_BNSD
    dim = int(model.head_dim * model.rope.partial_rotary_factor)
    frequencies_D, factor = _compute_frequencies(model, dim, is_sliding(model, layer), length)
    angles_B1SD = positions_BS[:, None, :, None] * frequencies_D
    z_BNSD = torch.complex(x_BNSD[..., : dim // 2], x_BNSD[..., dim // 2 : dim])
    z_BNSD = z_BNSD * torch.polar(torch.full_like(angles_B1SD, factor), angles_B1SD)
    return torch.cat((z_BNSD.real, z_BNSD.imag, x_BNSD[..., dim:]), -1)


def _compute_frequencies(
    model: ModelConfig, dim: int, is_sliding: bool, length: int
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of elements, and the factor of the rotated pair.

    Formulas: arXiv 2306.15595 (linear), 2309.00071 (section 3.1: dynamic; 3.2 to 3.4: yarn), and
    `apply_scaling` of Meta's llama-models (llama3).
    """
    rope, indices_D = model.rope, torch.arange(dim // 2, dtype=torch.float64)
    if is_sliding and rope.sliding_theta is not None:
        return rope.sliding_theta ** (-2 * indices_D / dim), 1.0
    theta, scaling, original = model.rope_theta, rope.scaling.value, rope.original_max_positions
    frequencies_D = theta ** (-2 * indices_D / dim)
    if scaling == "none":
        return frequencies_D, 1.0
    if scaling == "linear":
        return frequencies_D / rope.factor, 1.0
    assert original is not None
    if scaling == "dynamic":
        growth = rope.factor * max(length / original, 1) - (rope.factor - 1)
        return (theta * growth ** (dim / (dim - 2))) ** (-2 * indices_D / dim), 1.0
    if scaling == "llama3":
        rotations_D = original * frequencies_D / (2 * math.pi)
        transition = rope.high_freq_factor - rope.low_freq_factor
        kept_D = ((rotations_D - rope.low_freq_factor) / transition).clamp(0, 1)
        return frequencies_D * (kept_D + (1 - kept_D) / rope.factor), 1.0
    assert scaling == "yarn", f"model.rope.scaling={scaling}"
    first, last = (
        dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    kept_D = 1 - ((indices_D - first) / (last - first or 0.001)).clamp(0, 1)
    factor = rope.attention_factor or 0.1 * math.log(rope.factor) + 1
    return frequencies_D * (kept_D + (1 - kept_D) / rope.factor), factor
