"""Update rule of SOAP (arXiv 2409.11321, algorithm 3; https://github.com/nikhilvyas/SOAP)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import soap_spec
from hlat.optim.adamw import ADAMW
from hlat.optim.soap_spec import SIDES
from hlat.optim.update_rule import UpdateRule

State = dict[str, Tensor]


def compute_matrix_update(
    values: list[Tensor], step: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the update and the new state, of which preconditioners and eigenbases may be absent.

    The first update of a state is zero. The schedule of the eigenbases depends on the number of
    updates, so the host waits for the device.
    """
    gradient, *tensors = values
    state: State = dict(zip(group["state_names"], tensors, strict=True))
    num_updates = int(step) - 1
    if num_updates == 0:
        update = torch.zeros_like(gradient)
        state["exp_avg"] = state["rotated_exp_avg_sq"] = update
    else:
        update = _update_moments(gradient, state, num_updates, group)
    grams = {"left": lambda: gradient @ gradient.T, "right": lambda: gradient.T @ gradient}
    for side in _list_sides(state):
        gram = state[f"{side}_gram"]
        state[f"{side}_gram"] = gram.lerp(grams[side](), 1 - group["preconditioner_beta"])
    if num_updates == 0:
        for side in _list_sides(state):
            state[f"{side}_basis"] = compute_eigenbasis(state[f"{side}_gram"])
    elif num_updates % group["precondition_frequency"] == 0:
        _update_bases(state)
    return [update, *state.values()]


def _update_moments(
    gradient: Tensor, state: State, num_updates: int, group: dict[str, Any]
) -> Tensor:
    """Return Adam's update in the eigenbases, in the coordinates of the matrix.

    The average of gradients is stored in the coordinates of the matrix, in which it does not depend
    on the eigenbases.
    """
    beta1, beta2 = group["betas"]
    average = state["exp_avg"].lerp(gradient, 1 - beta1)
    rotated = _rotate(gradient, state)
    square = state["rotated_exp_avg_sq"] * beta2 + rotated * rotated * (1 - beta2)
    state["exp_avg"], state["rotated_exp_avg_sq"] = average, square
    correction = (1 - beta2**num_updates) ** 0.5 / (1 - beta1**num_updates)
    quotient = _rotate(average, state) / (square.sqrt() + group["eps"]) * correction
    return _rotate(quotient, state, back=True)


def compute_eigenbasis(gram: Tensor) -> Tensor:
    """Return the eigenvectors in columns, in descending order of their eigenvalues.

    The element of each with the largest magnitude is positive. A matrix that is not finite gives a
    basis without a meaning, since its step is skipped.
    """
    basis: Tensor = torch.linalg.eigh(torch.nan_to_num(gram, 0.0, 0.0, 0.0)).eigenvectors.flip(1)
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0)


def improve_eigenbasis(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis after a step of the power method, and the order of the former columns.

    The columns are in descending order of the estimated eigenvalues. Their signs are those for
    which R of the QR decomposition has a positive diagonal.
    """
    product = gram @ basis
    order = (basis * product).sum(dim=0).argsort(descending=True, stable=True)
    improved, triangle = torch.linalg.qr(product[:, order])
    return improved * torch.where(triangle.diagonal() < 0, -1.0, 1.0), order


def _update_bases(state: State) -> None:
    """Improve the eigenbases, and reorder the second moment as their columns."""
    for dim, side in enumerate(SIDES):
        if f"{side}_basis" in state:
            basis, order = improve_eigenbasis(state[f"{side}_gram"], state[f"{side}_basis"])
            state[f"{side}_basis"] = basis
            state["rotated_exp_avg_sq"] = state["rotated_exp_avg_sq"].index_select(dim, order)


def _rotate(matrix: Tensor, state: Mapping[str, Tensor], back: bool = False) -> Tensor:
    """Return Q_L^T M Q_R, or Q_L M Q_R^T, where an absent eigenbasis is the identity."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    if left is not None:
        matrix = (left if back else left.T) @ matrix
    return matrix if right is None else matrix @ (right.T if back else right)


def _list_sides(state: Mapping[str, Tensor]) -> list[str]:
    """Return the sides that have a preconditioner."""
    return [side for side in SIDES if f"{side}_gram" in state]


SOAP = UpdateRule(ADAMW.compute, ADAMW.fused, compute_matrix_update)
set_implementation("optimizer", soap_spec.NAME, SOAP)
