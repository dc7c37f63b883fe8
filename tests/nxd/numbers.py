"""Small integers with exact sums in any order, and the reference in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional


def small_integers(*shape: int, seed: int = 0) -> Tensor:
    """Return integers in [-3, 3]: dot products of hundreds are exact in fp32, of a few in bf16."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of a linear layer and the gradients of its input and weight."""
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    output = functional.linear(x, weight)
    output.backward(grad)
    return output.detach(), x.grad, weight.grad
