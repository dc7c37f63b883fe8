"""Interface of an optimizer's update rule in torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ParamGroups = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class FusedKernel:
    """Kernel that computes an update in one pass over the tensors, on devices that have it.

    Attributes:
        is_available: Returns True if a device has a correct kernel for tensors of a dtype.
        update_: Updates parameters and state in place, given lists of gradients, of parameters and
            of each state tensor, the number of updates of each parameter, the learning rate, the
            parameter group, and a scalar that is 1 to change nothing.
    """

    is_available: Callable[[torch.device, torch.dtype], bool]
    update_: Callable[
        [list[list[Tensor]], list[Tensor], float, dict[str, Any], Tensor | None], None
    ]


@dataclass(frozen=True)
class UpdateRule:
    """Update rule of an optimizer; all precision recipes, layouts and engines apply it.

    Attributes:
        compute: Returns the new parameter and state, given gradient, parameter and state in one
            dtype, the number of updates including this one, the learning rate in the same dtype,
            and the parameter group.
        fused: Kernel with the same result up to rounding.
        compute_matrix: For roles without an element-wise update. Returns the update of a whole
            matrix, in any dtype, and its new state, given gradient and state in fp32, the number of
            updates, and the parameter group, of which `state_names` are the names of the state. The
            product of update, learning rate and the specification's `get_matrix_scale` is
            subtracted from the decayed weights.
    """

    compute: Callable[[list[Tensor], Tensor, Tensor, dict[str, Any]], list[Tensor]]
    fused: FusedKernel | None = None
    compute_matrix: Callable[[list[Tensor], Tensor, dict[str, Any]], list[Tensor]] | None = None


def init_state(optimizer: torch.optim.Optimizer, step_dtype: torch.dtype = torch.float32) -> None:
    """Set the state of all parameters to zero: the tensors of their group, and `step`, a scalar."""
    for group in optimizer.param_groups:
        dtypes = group["state_dtypes"]
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=step_dtype, device=param.device),
                **{
                    name: torch.zeros_like(param, dtype=dtypes.get(name))
                    for name in group["state_names"]
                },
            }


def store_update(stored: list[Tensor], updated: list[Tensor], found_inf: Tensor | None) -> None:
    """Round updated tensors into the stored ones, or change nothing if `found_inf` is not zero."""
    if found_inf is not None and found_inf.device.type == "cpu":  # read without synchronization
        if found_inf:
            return
        found_inf = None
    for old, new in zip(stored, updated, strict=True):
        rounded = new.to(old.dtype)
        old.copy_(rounded if found_inf is None else torch.where(found_inf.bool(), old, rounded))
