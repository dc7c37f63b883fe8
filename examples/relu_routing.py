"""Experts with positive scores: ReLU routing (ReMoE, arXiv 2412.14711) with a fixed L1 weight.

hlat train extensions=[examples/relu_routing.py] model=qwen3_moe_tiny model.mlp.kind=relu
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hlat.config.components import register_component
from hlat.config.model import ModelConfig
from hlat.model.mlp_spec import MoEConfig, StepMetricValue
from hlat.model.moe import MoE
from hlat.model.moe_spec import MoESpec


class ReluSpec(MoESpec):
    """Settings of model.mlp.moe; experts_per_token is the mean that plan and loss assume."""

    def find_conflicts(self, model: ModelConfig) -> Iterator[str]:
        yield from super().find_conflicts(model)
        unused = ("scoring", "num_groups", "routed_scale", "z_loss", "bias_update_rate")
        for name in (*unused, "balance_scope", "capacity_factor"):
            if getattr(model.mlp.moe, name) != getattr(MoEConfig(), name):
                yield f"model.mlp.moe.{name} has no effect with model.mlp.kind=relu; remove it"

    def compute_step_metrics(
        self, model: ModelConfig, counts: list[list[int]], sums: list[list[float]]
    ) -> dict[str, StepMetricValue]:
        metrics = super().compute_step_metrics(model, counts, sums)
        metrics.pop("router_entropy", None)
        return metrics | {"router_experts_per_token": sum(map(sum, counts)) / sum(map(sum, sums))}


class ReluMoE(MoE):
    """Sum of the experts of which the router's output is positive, with this output as weight."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        router = self.gate
        weights_BSE = torch.relu(x_BSH.float() @ router.weight.float().t())
        if router.loss is not None and router.loss.is_active:
            weights_BSE = router.loss(weights_BSE, self._compute_l1_loss(weights_BSE))
        counts = torch.nn.functional.pad(weights_BSE.count_nonzero((0, 1)), (0, 1))  # none dropped
        if router.statistics.is_active:
            num_tokens = weights_BSE.new_full((1,), x_BSH[..., 0].numel())
            weights_BSE = router.statistics(weights_BSE, counts, num_tokens)
        weights_ET = weights_BSE.flatten(0, 1).t()
        experts_R, tokens_R = weights_ET.nonzero(as_tuple=True)
        return self.apply_rows(x_BSH, tokens_R, weights_ET[experts_R, tokens_R], counts[:-1])

    def _compute_l1_loss(self, weights_BSE: Tensor) -> Tensor:
        """Return the sum over sequences of the L1 norm, weighted by loads (equation 8)."""
        moe = self.gate.settings
        loads_BE = (weights_BSE > 0).float().mean(1) * moe.num_experts / moe.experts_per_token
        return moe.balance_loss * (loads_BE * weights_BSE.mean(1)).sum()


COMPONENT = ("model.mlp", "relu", "Experts with positive scores.", ReluSpec())
register_component(*COMPONENT, implementation=ReluMoE, base="moe")
