"""Grouped-query self-attention. Tensor names end in their dimensions as in decoder.py."""

import torch
from torch import Tensor, nn

from hlat.config.components import set_implementation
from hlat.config.model import ModelConfig
from hlat.model.attention_kernels import KeyRange, attend
from hlat.model.attention_spec import QKNormScope, get_window
from hlat.model.kv_cache import KVCacheUpdate
from hlat.model.linear import Linear
from hlat.model.norm import ProjectionNorm, RMSNorm
from hlat.model.parametrization_spec import compute_attention_scale
from hlat.model.rope import RopeCosSin, apply_rotary_emb


class CoreAttention(nn.Module):
    """Causal softmax attention, a module that activation checkpointing can wrap."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.scale = compute_attention_scale(model)
        self.window, self.softcap = get_window(model, layer), model.attention.logit_softcap

    def forward(
        self,
        q_BNSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        key_range: KeyRange | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attend to the keys in the range and the window of the layer; returns y_BNSD."""
        return attend(
            q_BNSD, k_BGSD, v_BGSD, self.scale, key_range, self.window, self.softcap, sinks_N
        )


class Attention(nn.Module):
    """Grouped-query self-attention; rows of qkv_proj are queries, key, value for each group.

    The bias of the output projection is a parameter of its own, since it is added after the sum of
    the partial outputs of tensor-parallel ranks.
    """

    def __init__(self, model: ModelConfig, layer: int, fp32_norms: bool) -> None:
        super().__init__()
        settings, hidden, head_dim = model.attention, model.hidden_size, model.head_dim
        num_heads, num_groups = model.num_attention_heads, model.num_key_value_heads
        self.head_dim, self.queries_per_group = head_dim, model.num_key_value_groups
        num_projected = num_heads + 2 * num_groups
        self.qkv_proj = Linear(hidden, num_projected * head_dim, bias=settings.qkv_bias)
        self.normalizes_heads = settings.qk_norm_scope is QKNormScope.head
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if settings.qk_norm and self.normalizes_heads:
            self.q_norm = RMSNorm(model, head_dim, fp32_norms)
            self.k_norm = RMSNorm(model, head_dim, fp32_norms)
        elif settings.qk_norm:
            self.q_norm = ProjectionNorm(model, num_heads * head_dim, fp32_norms)
            self.k_norm = ProjectionNorm(model, num_groups * head_dim, fp32_norms)
        self.sinks = nn.Parameter(torch.empty(num_heads)) if settings.sinks else None
        self.core: nn.Module = CoreAttention(model, layer)
        self.o_proj = Linear(num_heads * head_dim, hidden, bias=False)
        self.o_bias = nn.Parameter(torch.empty(hidden)) if settings.output_bias else None

    def forward(
        self,
        x_BSH: Tensor,
        cos_sin: RopeCosSin | None,
        key_range: KeyRange | None = None,
        update_kv_cache: KVCacheUpdate | None = None,
    ) -> Tensor:
        """Apply self-attention; without cos_sin, heads do not rotate; returns [B, S, H]."""
        return self.project_output(self.attend(x_BSH, cos_sin, key_range, update_kv_cache))

    def attend(
        self,
        x_BSH: Tensor,
        cos_sin: RopeCosSin | None,
        key_range: KeyRange | None = None,
        update_kv_cache: KVCacheUpdate | None = None,
    ) -> Tensor:
        """Return the weighted values of each query head, [B, S, N, D]."""
        heads = (-1, self.queries_per_group + 2, self.head_dim)
        qkv_BSGTD = torch.unflatten(self.qkv_proj(x_BSH), -1, heads)
        q_BSGRD, k_BSG1D, v_BSG1D = torch.split(qkv_BSGTD, [self.queries_per_group, 1, 1], dim=-2)
        q_BSND, k_BSGD, v_BSGD = (x.flatten(2, 3) for x in (q_BSGRD, k_BSG1D, v_BSG1D))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSND, k_BSGD = (
                self._normalize(self.q_norm, q_BSND),
                self._normalize(self.k_norm, k_BSGD),
            )
        if cos_sin is not None:
            q_BSND, k_BSGD = apply_rotary_emb(q_BSND, cos_sin), apply_rotary_emb(k_BSGD, cos_sin)
        q_BNSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGD))
        if update_kv_cache is not None:
            k_BGSD, v_BGSD = update_kv_cache(k_BGSD, v_BGSD)
        y_BNSD: Tensor = self.core(q_BNSD, k_BGSD, v_BGSD, key_range, self.sinks)
        return y_BNSD.transpose(1, 2)

    def project_output(self, y_BSND: Tensor) -> Tensor:
        """Apply the output projection to all heads; returns [B, S, H]."""
        y_BSH: Tensor = self.o_proj(y_BSND.flatten(2))
        return y_BSH if self.o_bias is None else y_BSH + self.o_bias

    def _normalize(self, norm: RMSNorm, x_BSND: Tensor) -> Tensor:
        """Apply QK-norm to each head, or to all heads together."""
        if self.normalizes_heads:
            y_BSND: Tensor = norm(x_BSND)
            return y_BSND
        return torch.unflatten(norm(x_BSND.flatten(2)), -1, (-1, self.head_dim))


set_implementation("model.attention", "softmax", Attention)
