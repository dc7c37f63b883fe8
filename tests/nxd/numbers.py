"""Numbers whose sums are exact in any order, and what plain PyTorch makes of them."""

import torch
from torch import Tensor
from torch.nn import functional


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """From -3 to 3: sums of hundreds of their products are exact in fp32, and of a few in bf16."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output of a linear layer, gradients of its input and its weight."""
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    output = functional.linear(x, weight)
    output.backward(grad)
    return output.detach(), x.grad, weight.grad
