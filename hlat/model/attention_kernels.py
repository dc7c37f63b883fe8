"""Attention kernels: causal softmax attention within a window and a document.

Each query attends to one interval of keys. `attend` selects the kernel: PyTorch's fused attention
without a mask; blocks of queries on a CPU (cpu_attention.py, or block_attention.py if the layer is
compiled); FlexAttention on CUDA (flex_attention.py); a mask of queries over keys while decoding and
on other devices.

Tensor names end in their dimensions: B sequences, S queries, K keys, D head size, G key/value heads
(groups), R query heads per group, N = G R query heads.
"""

# ruff: noqa: N812

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hlat.model.block_attention import can_fuse_blocks, causal_block_attention
from hlat.model.cpu_attention import interval_attention
from hlat.model.flex_attention import attend_flex, build_block_mask

_DEVICES_WITHOUT_FLEX_ATTENTION = ("cpu", "meta", "mps", "neuron", "xla")
"""Device types on which torch does not compile FlexAttention's forward and backward kernels."""


@dataclass(frozen=True, eq=False)
class KeyRange:
    """Keys that each query attends to, before the limit of a window.

    Attributes:
        first_BS: First position, such as the start of the document; None: 0.
        last_BS: Last position, inclusive, which is the position of the query; None: the queries
            are the last positions of the keys.
        masks: Masks by window, for the kernels that read one; see `build_masks`.
    """

    first_BS: Tensor | None = None
    last_BS: Tensor | None = None
    masks: Mapping[int | None, Tensor | BlockMask] = field(default_factory=dict)


def attend(
    q_BNSD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    scale: float,
    key_range: KeyRange | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return y_BNSD, the softmax of the scores times the values.

    Args:
        q_BNSD: Queries.
        k_BGKD: Keys; the R consecutive query heads of a group attend to the same keys.
        v_BGKD: Values.
        scale: Factor of the scores.
        key_range: Keys that each query attends to; None: all keys up to its position. Without
            `last_BS` the queries are the last positions of the keys.
        window: Limit to this number of keys up to the position of the query; None: no limit.
        softcap: Limit the scores to this value c by c * tanh(score / c); None: no limit.
        sinks_N: Logit of each head that is added to the denominator of the softmax; None: none.
    """
    num_queries, num_keys = q_BNSD.shape[2], k_BGKD.shape[2]
    key_range = key_range or KeyRange()
    window = _reduce_window(window, num_keys)
    is_range_full = key_range.first_BS is None and key_range.last_BS is None
    if num_queries == 1 and is_range_full and window is not None:
        k_BGKD, v_BGKD, window = k_BGKD[:, :, -window:], v_BGKD[:, :, -window:], None
        key_range = KeyRange()  # its masks are those of all keys
    is_softmax_plain = softcap is None and sinks_N is None
    needs_mask = _needs_mask(key_range, window, num_queries, num_keys)
    is_cpu_training = q_BNSD.is_cpu and _is_self_attention(key_range, num_queries, num_keys)
    if is_softmax_plain and not needs_mask:
        if is_cpu_training and can_fuse_blocks(q_BNSD):
            return causal_block_attention(q_BNSD, k_BGKD, v_BGKD, scale)
        return _attend_fused(q_BNSD, k_BGKD, v_BGKD, None, scale)
    if is_cpu_training:
        y_BNSD: Tensor = interval_attention(
            q_BNSD, k_BGKD, v_BGKD, sinks_N, key_range.first_BS, window, scale, softcap
        )[0]
        return y_BNSD
    mask = key_range.masks.get(window)
    if mask is None and (needs_mask or num_queries > 1):
        shape_BSK = q_BNSD.shape[0], num_queries, num_keys
        mask = _build_mask(key_range, window, shape_BSK, q_BNSD.dtype, q_BNSD.device)
    if isinstance(mask, BlockMask):
        return attend_flex(q_BNSD, k_BGKD, v_BGKD, mask, scale, softcap, sinks_N)
    if is_softmax_plain:
        return _attend_fused(q_BNSD, k_BGKD, v_BGKD, mask, scale)
    return _attend_unfused(q_BNSD, k_BGKD, v_BGKD, mask, scale, softcap, sinks_N)


def build_masks(
    key_range: KeyRange | None,
    windows: Iterable[int | None],
    shape_BSK: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> KeyRange | None:
    """Return the key range with the masks that the layers of a model share.

    Call it once per forward pass. Without it, `attend` builds a mask in each layer. The masks of a
    CPU in training are built in its kernel, block by block.

    Args:
        key_range: Keys that each query attends to.
        windows: Windows of the layers.
        shape_BSK: Number of rows, of queries and of keys.
        dtype: Data type of the queries.
        device: Device of the queries.
    """
    _, num_queries, num_keys = shape_BSK
    base = key_range or KeyRange()
    reduced = {_reduce_window(window, num_keys) for window in windows}
    is_in_blocks = device.type == "cpu" and _is_self_attention(base, num_queries, num_keys)
    if is_in_blocks or not any(
        _needs_mask(base, window, num_queries, num_keys) for window in reduced
    ):
        return key_range
    masks = {window: _build_mask(base, window, shape_BSK, dtype, device) for window in reduced}
    return replace(base, masks=masks)


def compute_document_starts(document_ids_BS: Tensor) -> Tensor:
    """Return the first position of the document of each position, [B, S].

    Each document is contiguous.
    """
    is_start_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    is_start_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    positions_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
    return torch.where(is_start_BS, positions_S, 0).cummax(1).values


def _reduce_window(window: int | None, num_keys: int) -> int | None:
    """Return None for a window that limits nothing."""
    return None if window is None or window >= num_keys else window


def _is_self_attention(key_range: KeyRange, num_queries: int, num_keys: int) -> bool:
    """Return True if query i has position i, as in training."""
    return key_range.last_BS is None and num_queries == num_keys


def _needs_mask(key_range: KeyRange, window: int | None, num_queries: int, num_keys: int) -> bool:
    """Return False if attention is causal or, for one query, full."""
    if key_range.first_BS is not None or key_range.last_BS is not None or window is not None:
        return True
    return num_queries not in (1, num_keys)


def _build_mask(
    key_range: KeyRange,
    window: int | None,
    shape_BSK: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | BlockMask:
    """Return the causal mask within a document and model.attention.sliding_window.

    It is a block mask for several queries on CUDA, otherwise an additive mask [B, 1, S, K].
    The additive mask is 0 for visible keys and -inf for others. Given a boolean mask, torch would
    convert it in every layer and save each copy for backward.
    """
    num_rows, num_queries, num_keys = shape_BSK
    last_BS = key_range.last_BS
    if last_BS is None:
        last_S = torch.arange(num_keys - num_queries, num_keys, device=device)
        last_BS = last_S.expand(num_rows, -1)
    first_BS = torch.zeros_like(last_BS) if key_range.first_BS is None else key_range.first_BS
    if window is not None:
        first_BS = torch.maximum(first_BS, last_BS - (window - 1))
    if device.type not in _DEVICES_WITHOUT_FLEX_ATTENTION and num_queries > 1:
        return build_block_mask(first_BS, last_BS, num_keys)
    positions_K = torch.arange(num_keys, device=device)
    is_visible_BSK = (positions_K >= first_BS.unsqueeze(2)) & (positions_K <= last_BS.unsqueeze(2))
    mask_BSK = torch.zeros(is_visible_BSK.shape, dtype=dtype, device=device)
    return mask_BSK.masked_fill(~is_visible_BSK, float("-inf")).unsqueeze(1)


def _attend_fused(
    q_BNSD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_B1SK: Tensor | None, scale: float
) -> Tensor:
    """Attend with PyTorch's fused kernels; causally if there is no mask and several queries."""
    is_gqa = q_BNSD.shape[1] != k_BGKD.shape[1]
    is_decoding = q_BNSD.shape[2] < k_BGKD.shape[2]
    is_default = math.isclose(scale, q_BNSD.shape[-1] ** -0.5, rel_tol=1e-12)
    kernel_scale = None if is_default else scale
    has_flash_kernel = q_BNSD.is_cpu or q_BNSD.dtype != torch.float32
    if is_gqa and not is_decoding and not (mask_B1SK is None and has_flash_kernel):
        # Kernels other than flash attention often have no GQA (sdp_utils.cpp)
        k_BGKD, v_BGKD = (_repeat_kv(x, q_BNSD.shape[1]) for x in (k_BGKD, v_BGKD))
        is_gqa = False
    if mask_B1SK is None:
        return F.scaled_dot_product_attention(
            q_BNSD,
            k_BGKD,
            v_BGKD,
            is_causal=not is_decoding,
            scale=kernel_scale,
            enable_gqa=is_gqa,
        )
    return F.scaled_dot_product_attention(
        q_BNSD, k_BGKD, v_BGKD, attn_mask=mask_B1SK, scale=kernel_scale, enable_gqa=is_gqa
    )


def _attend_unfused(
    q_BNSD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask_B1SK: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attend with separate operators in fp32."""
    q_BGRSD = torch.unflatten(q_BNSD.float(), 1, (k_BGKD.shape[1], -1))
    k_BG1KD, v_BG1KD = (x.float().unsqueeze(2) for x in (k_BGKD, v_BGKD))
    scores = (q_BGRSD @ k_BG1KD.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask_B1SK is not None:
        scores = scores + mask_B1SK.unsqueeze(1)
    if sinks_N is None:
        probabilities = scores.softmax(-1)
    else:
        sinks = sinks_N.float().view(1, k_BGKD.shape[1], -1, 1, 1)
        logits = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        probabilities = logits.softmax(-1)[..., :-1]
    y_BNSD: Tensor = (probabilities @ v_BG1KD).flatten(1, 2).to(q_BNSD.dtype)
    return y_BNSD


def _repeat_kv(x_BGKD: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for its query heads; returns [B, N, K, D]."""
    num_repeats = num_heads // x_BGKD.shape[1]
    return x_BGKD.unsqueeze(2).expand(-1, -1, num_repeats, -1, -1).flatten(1, 2)
