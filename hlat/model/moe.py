"""Mixture of experts: router, auxiliary load-balancing loss (aux_loss) and experts.

Tensor names end in their dimensions as in decoder.py, and T tokens, E experts, K experts of a
token, R = T K rows, one for each selected expert of a token. G are groups of experts.
"""

# ruff: noqa: N812

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.components import set_implementation
from hlat.config.model import ModelConfig
from hlat.model.auxiliary_loss import AuxiliaryLoss
from hlat.model.experts import Experts
from hlat.model.linear import Linear
from hlat.model.mlp import MLP
from hlat.model.mlp_spec import BalanceScope, RouterScoring
from hlat.model.moe_spec import (
    BIAS_NAME,
    LOAD_NAME,
    compute_capacity,
    get_expert_size,
    uses_previous_load,
)
from hlat.model.row_permutation import copy_to_rows, sum_rows
from hlat.model.step_statistics import StepStatistics


class Router(nn.Module):
    """Selection of experts by scores in fp32, for every compute dtype."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.settings = model.mlp.moe
        self.weight = nn.Parameter(torch.empty(self.settings.num_experts, model.hidden_size))
        has_loss = self.settings.balance_loss > 0 or self.settings.z_loss > 0
        self.loss = AuxiliaryLoss() if has_loss else None
        zeros_E = torch.zeros(self.settings.num_experts, dtype=torch.float32)
        self.e_score_correction_bias: Tensor | None
        self.previous_load: Tensor | None
        self.register_buffer(BIAS_NAME, zeros_E if self.settings.bias_update_rate > 0 else None)
        self.register_buffer(LOAD_NAME, zeros_E + 1 if uses_previous_load(self.settings) else None)
        update = self._update_buffers if [*self.buffers()] else None
        self.statistics = StepStatistics(len(zeros_E) + 1, 1, update)

    @property
    def drops_tokens(self) -> bool:
        """True if experts have a limit of tokens."""
        return self.settings.capacity_factor is not None and torch.is_grad_enabled()

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, fp32, and indices of the selected experts of each token, [B, S, K].

        The index of a dropped selection is the number of experts.
        """
        moe, logits_BSE = self.settings, F.linear(x_BSH.float(), self.weight.float())
        is_softmax = moe.scoring is RouterScoring.softmax
        scores_BSE = logits_BSE.softmax(-1) if is_softmax else logits_BSE.sigmoid()
        rated_BSE = scores_BSE.detach()
        if self.e_score_correction_bias is not None:
            rated_BSE = rated_BSE + self.e_score_correction_bias
        if moe.groups_per_token < moe.num_groups:
            rated_BSE = self._exclude_groups(rated_BSE, 1 if is_softmax else 2)
        experts_BSK = rated_BSE.topk(moe.experts_per_token).indices
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if moe.normalize_top_k:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        if moe.routed_scale != 1:
            weights_BSK = weights_BSK * moe.routed_scale
        if self.loss is not None and self.loss.is_active:
            loss = self._compute_loss(logits_BSE, scores_BSE, experts_BSK)
            weights_BSK = self.loss(weights_BSK, loss)
        limited_BSK = self._drop_tokens(experts_BSK) if self.drops_tokens else experts_BSK
        if self.statistics.is_active:
            statistics = self._compute_statistics(scores_BSE, experts_BSK, limited_BSK)
            weights_BSK = self.statistics(weights_BSK, *statistics)
        return weights_BSK, limited_BSK

    def _drop_tokens(self, experts_BSK: Tensor) -> Tensor:
        """Return the experts, with the number of experts for selections above the capacity.

        Earlier tokens of a sequence come first, so that no token depends on a later one.
        """
        moe, selected_BR = self.settings, experts_BSK.flatten(1)
        order_BR = selected_BR.argsort(dim=1, stable=True)
        sorted_BR = selected_BR.gather(1, order_BR)
        positions_R = torch.arange(selected_BR.shape[1], device=selected_BR.device)
        ranks_BR = positions_R - torch.searchsorted(sorted_BR, sorted_BR)
        is_dropped_BR = ranks_BR >= compute_capacity(moe, experts_BSK.shape[1])
        limited_BR = sorted_BR.masked_fill(is_dropped_BR, moe.num_experts)
        return selected_BR.scatter(1, order_BR, limited_BR).view_as(experts_BSK)

    @torch.no_grad()
    def _update_buffers(self, counts: Tensor, skip: Tensor) -> None:
        """Update bias and load of each expert, given the counts of the global batch.

        Add the update rate to biases of experts with less than the mean load, or subtract it.
        """
        counts_E = counts[:-1]
        updates = list[tuple[Tensor, Tensor]]()
        if (bias_E := self.e_score_correction_bias) is not None:
            directions_E = (counts_E.sum() - counts_E * len(counts_E)).sign()
            updates.append((bias_E, bias_E + self.settings.bias_update_rate * directions_E))
        if (load_E := self.previous_load) is not None:
            updates.append((load_E, counts_E * len(counts_E) / counts_E.sum()))
        for buffer, values in updates:
            buffer.copy_(values.where(~skip, buffer))

    @torch.no_grad()
    def _compute_statistics(
        self, scores_BSE: Tensor, experts_BSK: Tensor, limited_BSK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the selections of each expert and the dropped ones, [E + 1], and entropies, [1].

        The entropies are summed, in nats. Sigmoid scores are normalized to a sum of one.
        """
        num_experts = scores_BSE.shape[-1]
        counts_E = count_rows(experts_BSK.flatten(), num_experts)
        num_dropped = (limited_BSK == num_experts).sum().view(1)
        probs_BSE = F.normalize(scores_BSE, p=1, dim=-1)
        entropy = -probs_BSE.xlogy(probs_BSE).sum().view(1)
        return torch.cat([counts_E, num_dropped]), entropy

    def _compute_loss(self, logits_BSE: Tensor, scores_BSE: Tensor, experts_BSK: Tensor) -> Tensor:
        """Return the sum of the losses of all sequences (MoEConfig.balance_loss and z_loss)."""
        moe, length = self.settings, scores_BSE.shape[1]
        loss = torch.zeros((), device=scores_BSE.device)
        if moe.balance_loss:
            means_BE = F.normalize(scores_BSE, p=1, dim=-1).mean(1)
            load_BE = self._compute_load(scores_BSE, experts_BSK)
            loss = loss + moe.balance_loss * (load_BE * means_BE).sum()
        if moe.z_loss:
            loss = loss + moe.z_loss / length * logits_BSE.logsumexp(-1).square().sum()
        return loss

    def _compute_load(self, scores_BSE: Tensor, experts_BSK: Tensor) -> Tensor:
        """Return the selections of experts over their mean in the scope of the balance loss.

        The shape is [B, E] or, if all sequences have the same load, [E].
        """
        if self.previous_load is not None:
            return self.previous_load
        num_sequences, _, num_experts = scores_BSE.shape
        counts_BE = scores_BSE.new_zeros(num_sequences, num_experts)
        selected_BR = experts_BSK.flatten(1)
        counts_BE.scatter_add_(1, selected_BR, scores_BSE.new_ones(()).expand_as(selected_BR))
        load_BE = counts_BE * num_experts / selected_BR.shape[1]
        is_shared = self.settings.balance_scope is BalanceScope.micro_batch
        return load_BE.mean(0) if is_shared else load_BE

    def _exclude_groups(self, scores_BSE: Tensor, num_rated: int) -> Tensor:
        """Return the scores with -inf in all but the best groups.

        A group is rated by the sum of its `num_rated` best scores.
        """
        moe = self.settings
        scores_BSGE = torch.unflatten(scores_BSE, -1, (moe.num_groups, -1))
        ratings_BSG = scores_BSGE.topk(num_rated).values.sum(-1)
        groups_BSG = ratings_BSG.topk(moe.groups_per_token).indices
        is_excluded_BSG1 = torch.ones_like(ratings_BSG, dtype=torch.bool)
        is_excluded_BSG1 = is_excluded_BSG1.scatter(-1, groups_BSG, False).unsqueeze(-1)
        allowed_BSE: Tensor = scores_BSGE.masked_fill(is_excluded_BSG1, -torch.inf).flatten(-2)
        return allowed_BSE


class MoE(nn.Module):
    """Weighted sum of the networks that the router selects for a token, and of a shared one."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        moe = model.mlp.moe
        self.gate = Router(model)
        self.experts = Experts(model, moe.num_experts, get_expert_size(model))
        self.shared_expert = None if moe.shared_size is None else MLP(model, moe.shared_size)
        self.shared_expert_gate: Linear | None = None
        if moe.shared_gate:
            self.shared_expert_gate = Linear(model.hidden_size, 1, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Apply the selected experts to each token; returns [B, S, H]."""
        weights_BSK, experts_BSK = self.gate(x_BSH)
        x_TH, experts_TK = x_BSH.flatten(0, 1), experts_BSK.flatten(0, 1)
        experts_R = experts_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        position_R = order_R.argsort()
        counts_E = count_rows(experts_R, len(self.experts) + 1)[:-1]
        rows_RH = copy_to_rows(x_TH, order_R, position_R)
        num_dropped = len(order_R) - int(counts_E.sum()) if self.gate.drops_tokens else 0
        if num_dropped:
            kept_RH = self.experts(rows_RH[:-num_dropped], counts_E)
            outputs_RH = F.pad(kept_RH, (0, 0, 0, num_dropped))
        else:
            outputs_RH = self.experts(rows_RH, counts_E)
        weights_TK = weights_BSK.flatten(0, 1).to(outputs_RH.dtype)
        y_TH = sum_rows(outputs_RH, weights_TK, order_R, position_R)
        return self._add_shared(x_BSH, y_TH.view_as(x_BSH))

    def apply_rows(
        self, x_BSH: Tensor, tokens_R: Tensor, weights_R: Tensor, counts_E: Tensor
    ) -> Tensor:
        """Apply the experts to any rows of tokens; returns [B, S, H].

        Args:
            x_BSH: Input.
            tokens_R: Index among the B S tokens of each row, sorted by expert.
            weights_R: Factor of the output of each row.
            counts_E: Number of rows of each expert.
        """
        x_TH = x_BSH.flatten(0, 1)
        outputs_RH = self.experts(x_TH[tokens_R], counts_E)
        outputs_RH = weights_R.unsqueeze(1).to(outputs_RH.dtype) * outputs_RH
        y_TH = torch.zeros_like(x_TH).index_add(0, tokens_R, outputs_RH)
        return self._add_shared(x_BSH, y_TH.view_as(x_BSH))

    def _add_shared(self, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
        """Add the output of the network for all tokens, if there is one."""
        if self.shared_expert is None:
            return y_BSH
        shared_BSH: Tensor = self.shared_expert(x_BSH)
        if self.shared_expert_gate is not None:
            shared_BSH = self.shared_expert_gate(x_BSH).sigmoid() * shared_BSH
        return y_BSH + shared_BSH


def count_rows(experts_R: Tensor, num_experts: int) -> Tensor:
    """Return the number of rows of each expert, [E], without host synchronization."""
    counts_E = experts_R.new_zeros(num_experts)
    return counts_E.scatter_add_(0, experts_R, torch.ones_like(experts_R))


set_implementation("model.mlp", "moe", MoE)
