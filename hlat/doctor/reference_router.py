"""Reference implementation of the router of a mixture of experts in fp64.

It reads only the settings of MoEConfig. Tensor names end in their dimensions as in
reference_model.py, and E experts, G groups of experts.
"""

import math

import torch
from torch import Tensor

from hlat.model.mlp_spec import BalanceScope, MoEConfig

ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
"""Buffer of a layer; without it the bias is zero."""
ROUTER_LOAD = "mlp.gate.previous_load"
"""Buffer of a layer: selections of each expert in the previous step, over their mean."""


def route(moe: MoEConfig, logits_BSE: Tensor, bias_E: Tensor | None) -> Tensor:
    """Return the weight of each expert for each token, 0 if it is not selected.

    The bias, if there is one, changes the selection only.
    """
    is_softmax = moe.scoring.value == "softmax"
    scores_BSE = _score(moe, logits_BSE)
    rated_BSE = scores_BSE.detach() if bias_E is None else scores_BSE.detach() + bias_E
    groups_BSE = torch.split(rated_BSE, moe.num_experts // moe.num_groups, -1)
    num_rated = min(1 if is_softmax else 2, moe.num_experts // moe.num_groups)
    ratings_BSG = torch.stack([_sort(group)[..., :num_rated].sum(-1) for group in groups_BSE], -1)
    is_best_BSG = ratings_BSG >= _sort(ratings_BSG)[..., [moe.groups_per_token - 1]]
    is_allowed_BSE = is_best_BSG.repeat_interleave(groups_BSE[0].shape[-1], -1)
    allowed_BSE = rated_BSE.masked_fill(~is_allowed_BSE, -math.inf)
    threshold_BS1 = _sort(allowed_BSE)[..., [moe.experts_per_token - 1]]
    weights_BSE = scores_BSE * (allowed_BSE >= threshold_BS1)
    if moe.normalize_top_k:
        weights_BSE = weights_BSE / weights_BSE.sum(-1, keepdim=True)
    return weights_BSE * moe.routed_scale


def _score(moe: MoEConfig, logits: Tensor) -> Tensor:
    return logits.softmax(-1) if moe.scoring.value == "softmax" else 1 / (1 + torch.exp(-logits))


def drop_tokens(moe: MoEConfig, weights_BSE: Tensor) -> Tensor:
    """Return the weights with 0 for tokens of a sequence above the limit of an expert."""
    if moe.capacity_factor is None:
        return weights_BSE
    limit = moe.capacity_factor * weights_BSE.shape[1] * moe.experts_per_token / moe.num_experts
    num_before_BSE = (weights_BSE > 0).cumsum(1) - 1
    return weights_BSE * (num_before_BSE < limit - 1e-6)


def compute_router_loss(
    moe: MoEConfig, logits_BSE: Tensor, bias_E: Tensor | None, load_E: Tensor | None
) -> Tensor:
    """Return the weighted losses of each sequence, [B].

    Balance: the number of experts times the sum over experts of their share of the selections and
    their mean score (DeepSeek-V3, equations 17 to 20). z: mean square of log(sum(exp(logits))).
    The share is that of the sequence, which is a micro batch, or given by the load of the previous
    step, 1 if there is none.
    """
    scores_BSE = _score(moe, logits_BSE)
    is_selected_BSE = route(moe, logits_BSE.detach(), bias_E) > 0
    share_BE = is_selected_BSE.double().mean(1) / moe.experts_per_token
    if moe.balance_scope is BalanceScope.previous_step:
        share_BE = (torch.ones_like(share_BE) if load_E is None else load_E) / moe.num_experts
    mean_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).mean(1)
    balance_B = moe.num_experts * (share_BE * mean_BE).sum(-1)
    return moe.balance_loss * balance_B + moe.z_loss * logits_BSE.logsumexp(-1).square().mean(1)


def update_router_buffers(
    moe: MoEConfig, logits_BSE: Tensor, bias_E: Tensor | None, load_E: Tensor | None
) -> None:
    """Change the bias, in place, towards balanced loads of the sequences, and set the load."""
    is_selected_BSE = route(moe, logits_BSE.detach(), bias_E) > 0
    new_load_E = is_selected_BSE.double().mean((0, 1)) * moe.num_experts / moe.experts_per_token
    if bias_E is not None:  # arXiv 2408.15664
        is_balanced_E = (new_load_E - 1).abs() < 1e-9
        bias_E += moe.bias_update_rate * (1 - new_load_E).sign().masked_fill(is_balanced_E, 0.0)
    if load_E is not None:
        load_E.copy_(new_load_E)


def _sort(values: Tensor) -> Tensor:
    return values.sort(-1, descending=True).values
