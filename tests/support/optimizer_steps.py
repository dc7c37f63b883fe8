"""Steps of an optimizer of hlat and of another implementation with the same gradients."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hlat.config.optimizer import OptimizerConfig
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_factory import build_optimizer, build_param_groups, get_update_rule

SHAPES = {ParameterRole.matrix: (24, 16), ParameterRole.norm: (16,)}
"""Shape of the parameter of each role."""
NUM_STEPS = 50


def sample_weights() -> list[nn.Parameter]:
    """Return the same random weights in every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]


def sample_gradients(num_steps: int = NUM_STEPS) -> list[list[Tensor]]:
    """Return the gradients of each step, of sizes that differ between steps and elements."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4
            for shape in SHAPES.values()
        ]
        for _ in range(num_steps)
    ]


def build_ours(settings: OptimizerConfig, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the configured optimizer for weights with the roles of `SHAPES`."""
    groups = build_param_groups(settings, zip(weights, SHAPES, strict=True))
    return build_optimizer(get_update_rule(settings), groups, settings.lr)


def train(
    optimizer: torch.optim.Optimizer,
    weights: list[nn.Parameter],
    gradients: Iterable[list[Tensor]],
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Run a step with each of the gradients, after `before_step` with its 0-based number."""
    for step, of_step in enumerate(gradients):
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = gradient.clone()
        before_step(step)
        optimizer.step()
