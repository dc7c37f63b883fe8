"""Copies of tokens in another order have the gradients of an index."""

import pytest
import torch

from hlat.model import row_permutation
from hlat.model.row_permutation import copy_to_rows, sum_rows


@pytest.mark.parametrize(("num_tokens", "num_copies"), [(5, 1), (7, 3), (1, 4)])
def test_copies_and_gradients_equal_those_of_an_index(num_tokens: int, num_copies: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    order_R = torch.randperm(num_tokens * num_copies, generator=generator)
    position_R = order_R.argsort()
    gradient_RH = torch.randn(len(order_R), 6, generator=generator, dtype=torch.float64)
    rows_RH = copy_to_rows(x_TH, order_R, position_R)
    expected_RH = x_TH[order_R // num_copies]
    assert torch.equal(rows_RH, expected_RH)
    found, expected = (
        torch.autograd.grad(one, x_TH, gradient_RH)[0] for one in (rows_RH, expected_RH)
    )
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("num_tokens", "num_copies"), [(5, 1), (7, 3), (1, 4)])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_sums_and_gradients_equal_those_of_an_index(
    monkeypatch, num_tokens: int, num_copies: int, device: str
) -> None:
    if device == "other":
        monkeypatch.setattr(row_permutation, "_DEVICES_WITH_EMBEDDING_BAG", ())
    generator = torch.Generator().manual_seed(0)
    position_R = torch.randperm(num_tokens * num_copies, generator=generator)
    options = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    rows_RH = torch.randn(len(position_R), 6, **options)
    weights_TK = torch.randn(num_tokens, num_copies, **options)
    gradient_TH = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    sums_TH = sum_rows(rows_RH, weights_TK, position_R.argsort(), position_R)
    copies_TKH = rows_RH[position_R].view(num_tokens, num_copies, 6)
    expected_TH = (weights_TK.unsqueeze(2) * copies_TKH).sum(1)
    torch.testing.assert_close(sums_TH, expected_TH, rtol=1e-14, atol=1e-14)
    found, expected = (
        torch.autograd.grad(one, (rows_RH, weights_TK), gradient_TH)
        for one in (sums_TH, expected_TH)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
