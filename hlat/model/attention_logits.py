"""Largest attention logit, which grows before a run with a large learning rate diverges.

Tensor names end in their dimensions as in attention_kernels.py; C queries of a block.
"""

import torch
from torch import Tensor

from hlat.model.attention_kernels import KeyRange

_BLOCK_QUERIES = 128
"""Queries whose logits are computed at once."""


@torch.no_grad()
def compute_max_attention_logit(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    scale: float,
    key_range: KeyRange | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the largest scaled score of a query with a key that it attends to, in fp32.

    A softcap is not applied. The arguments are those of `attend` in training, with as many queries
    as keys.
    """
    num_keys, num_groups = k_BGSD.shape[2], k_BGSD.shape[1]
    q_BGRSD = torch.unflatten(q_BNSD, 1, (num_groups, -1)).float()
    k_BG1SD = k_BGSD.unsqueeze(2).float()
    positions_S = torch.arange(num_keys, device=k_BGSD.device)
    first_BS = torch.zeros_like(positions_S).unsqueeze(0)
    if key_range is not None and key_range.first_BS is not None:
        first_BS = key_range.first_BS
    if window is not None:
        first_BS = first_BS.maximum(positions_S - window + 1)
    maxima = []
    for start in range(0, num_keys, _BLOCK_QUERIES):
        end = min(start + _BLOCK_QUERIES, num_keys)
        scores_BGRCK = q_BGRSD[..., start:end, :] @ k_BG1SD[..., :end, :].transpose(-1, -2)
        keys_K, queries_C1 = positions_S[:end], positions_S[start:end].unsqueeze(1)
        attends_BCK = (keys_K <= queries_C1) & (keys_K >= first_BS[:, start:end].unsqueeze(2))
        maxima.append(scores_BGRCK.masked_fill(~attends_BCK[:, None, None], -torch.inf).amax())
    return torch.stack(maxima).amax() * scale
