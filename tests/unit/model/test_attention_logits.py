"""Largest attention logit, compared with all logits and an explicit mask."""

import math

import pytest
import torch

from hlat.model.attention_kernels import KeyRange, compute_document_starts
from hlat.model.attention_logits import compute_max_attention_logit

SEQUENCE = 300
"""More than two blocks of queries, the last one shorter."""


@pytest.mark.parametrize("window", [None, 1, 40, 1000])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_maximum_is_that_of_the_masked_matrix(
    window: int | None, has_documents: bool, num_groups: int
) -> None:
    generator = torch.Generator().manual_seed(num_groups)
    q = torch.randn(2, 4, SEQUENCE, 8, generator=generator).to(torch.bfloat16)
    k = torch.randn(2, num_groups, SEQUENCE, 8, generator=generator).to(torch.bfloat16)
    q[:, :, 0, 0], k[:, :, -1, 0] = 50, 50  # the largest score is not causal
    documents = torch.randint(0, 2, (2, SEQUENCE), generator=generator).cumsum(1)
    key_range = KeyRange(compute_document_starts(documents)) if has_documents else None
    positions = torch.arange(SEQUENCE)
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance < (window or SEQUENCE))
    if has_documents:
        mask = mask & (documents[:, :, None] == documents[:, None])
    scores = q.double() @ k.double().repeat_interleave(4 // num_groups, 1).transpose(-1, -2)
    expected = scores.masked_fill(~mask.expand(2, -1, -1)[:, None], -math.inf).amax() * 0.3
    found = compute_max_attention_logit(q, k, 0.3, key_range, window)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert float(scores.amax()) * 0.3 > float(expected)  # the mask matters
