"""Experts that select tokens: expert choice (arXiv 2202.09368), which leaks future tokens.

Each expert selects the tokens of a sequence with the highest scores, so whether an expert reads a
token depends on later tokens. A decoder trained so cannot generate; `hlat doctor` fails.

hlat doctor extensions=[examples/expert_choice.py] model=mixtral_tiny model.mlp.kind=expert_choice
"""

import torch
from torch import Tensor

from hlat.config.components import register_component
from hlat.model.moe import MoE
from hlat.model.moe_spec import MoESpec


class ExpertChoiceMoE(MoE):
    """Sum of the experts that select a token; experts_per_token is the mean of their number."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        moe, (num_sequences, length, _) = self.gate.settings, x_BSH.shape
        scores_BSE = (x_BSH.float() @ self.gate.weight.float().t()).softmax(-1)
        capacity = max(1, length * moe.experts_per_token // moe.num_experts)
        weights_BCE, positions_BCE = scores_BSE.topk(capacity, dim=1)
        starts_B11 = length * torch.arange(num_sequences, device=x_BSH.device).view(-1, 1, 1)
        tokens_R, weights_R = (
            values_BCE.movedim(-1, 0).flatten()
            for values_BCE in (starts_B11 + positions_BCE, weights_BCE)
        )
        counts_E = positions_BCE.new_full((moe.num_experts,), num_sequences * capacity)
        return self.apply_rows(x_BSH, tokens_R, weights_R, counts_E)


COMPONENT = ("model.mlp", "expert_choice", "Experts that select tokens.", MoESpec())
register_component(*COMPONENT, implementation=ExpertChoiceMoE, base="moe")
