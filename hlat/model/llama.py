"""Llama decoder: token ids to the hidden states that the output head reads.

The module contains no process group, mesh or engine. Rows of the fused projections (q/k/v, gate/up)
are ordered such that consecutive rows, cut between groups, are a valid tensor-parallel shard;
reshapes use -1, so the same code runs on a shard with fewer heads. Construction initializes no
weights, so a model on the meta device costs nothing.

Tensor names end in their dimensions: B sequences, S tokens, H hidden, V vocabulary, I intermediate,
D head size, G key/value heads (groups), R query heads per group, N = G R query heads, T = R + 2
heads of a group with its key and value. With a document mask or sequences of different lengths,
positions_S, cos_SD and sin_SD have a leading B. With a KV cache there are more keys than queries.
"""

# ruff: noqa: N812

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.model.autograd_functions import rms_norm, swiglu
from hlat.model.fused_weights import compute_gate_up_block_size
from hlat.model.kv_cache import KVCache, KVCacheUpdate


class Linear(nn.Linear):
    """Linear layer without bias that leaves its weight uninitialized."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing; see weight_initialization.py."""


class Embedding(nn.Embedding):
    """Embedding that leaves its weight uninitialized."""

    def reset_parameters(self) -> None:
        """Do nothing; see weight_initialization.py."""


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization, optionally computed in fp32 for bf16 inputs."""

    eps: float

    def __init__(self, hidden_size: int, eps: float, fp32: bool) -> None:
        super().__init__(hidden_size, eps)
        self.fp32 = fp32

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Normalize each position, then multiply by the weight."""
        if x_BSH.is_cpu:  # torch has no fused CPU kernel
            return rms_norm(x_BSH, self.weight, self.eps)
        if not self.fp32:
            return super().forward(x_BSH)
        y_BSH = F.rms_norm(x_BSH.float(), self.normalized_shape, self.weight.float(), self.eps)
        return y_BSH.to(x_BSH.dtype)


class CoreAttention(nn.Module):
    """Causal softmax attention, a module that activation checkpointing can wrap."""

    def forward(
        self, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, attn_mask_B1SS: Tensor | None = None
    ) -> Tensor:
        """Attend to current and earlier positions with scale 1 / sqrt(D); returns y_BNSD.

        An additive mask replaces the causal mask. Without one, fewer queries than keys (decoding)
        attend to all keys.
        """
        is_gqa = q_BNSD.shape[1] != k_BGSD.shape[1]
        is_decoding = q_BNSD.shape[2] < k_BGSD.shape[2]
        if attn_mask_B1SS is None:
            return F.scaled_dot_product_attention(
                q_BNSD, k_BGSD, v_BGSD, is_causal=not is_decoding, enable_gqa=is_gqa
            )
        if is_gqa and not is_decoding:
            # The only fused attention on GPUs with a mask and deterministic gradients, the
            # memory-efficient kernel, has no GQA on ROCm and in older releases (sdp_utils.cpp)
            k_BGSD, v_BGSD = (_repeat_kv(x, q_BNSD.shape[1]) for x in (k_BGSD, v_BGSD))
            is_gqa = False
        return F.scaled_dot_product_attention(
            q_BNSD, k_BGSD, v_BGSD, attn_mask=attn_mask_B1SS, enable_gqa=is_gqa
        )


class Attention(nn.Module):
    """Grouped-query self-attention; rows of qkv_proj are queries, key, value for each group."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.queries_per_group = config.head_dim, config.num_key_value_groups
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv_proj = Linear(config.hidden_size, num_heads * config.head_dim)
        self.core = CoreAttention()
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        x_BSH: Tensor,
        cos_SD: Tensor,
        sin_SD: Tensor,
        attn_mask_B1SS: Tensor | None = None,
        update_kv_cache: KVCacheUpdate | None = None,
    ) -> Tensor:
        """Apply self-attention; returns [B, S, H]."""
        heads = (-1, self.queries_per_group + 2, self.head_dim)
        qkv_BSGTD = torch.unflatten(self.qkv_proj(x_BSH), -1, heads)
        q_BSGRD, k_BSG1D, v_BSG1D = torch.split(qkv_BSGTD, [self.queries_per_group, 1, 1], dim=-2)
        q_BSND = apply_rotary_emb(q_BSGRD.flatten(2, 3), cos_SD, sin_SD)
        k_BSGD = apply_rotary_emb(k_BSG1D.flatten(2, 3), cos_SD, sin_SD)
        v_BSGD = v_BSG1D.flatten(2, 3)
        q_BNSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGD))
        if update_kv_cache is not None:
            k_BGSD, v_BGSD = update_kv_cache(k_BGSD, v_BGSD)
        y_BNSD = self.core(q_BNSD, k_BGSD, v_BGSD, attn_mask_B1SS)
        y_BSH: Tensor = self.o_proj(y_BNSD.transpose(1, 2).flatten(2))
        return y_BSH


class SwiGLU(nn.Module):
    """silu(gate) * up of alternating blocks, a module that activation checkpointing can wrap."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, gate_up_BS2I: Tensor) -> Tensor:
        """Return silu(gate) * up; [B, S, 2 I] to [B, S, I]."""
        return swiglu(gate_up_BS2I, self.block_size)


class MLP(nn.Module):
    """SwiGLU feed-forward network; rows of gate_up_proj alternate gate and up blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.swiglu = SwiGLU(compute_gate_up_block_size(config))
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Apply the network to each position; returns [B, S, H]."""
        y_BSH: Tensor = self.down_proj(self.swiglu(self.gate_up_proj(x_BSH)))
        return y_BSH


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, fp32_norms: bool) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps, fp32_norms)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BSH: Tensor,
        cos_SD: Tensor,
        sin_SD: Tensor,
        attn_mask_B1SS: Tensor | None = None,
        update_kv_cache: KVCacheUpdate | None = None,
    ) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        normed_BSH = self.input_layernorm(x_BSH)
        x_BSH = x_BSH + self.self_attn(normed_BSH, cos_SD, sin_SD, attn_mask_B1SS, update_kv_cache)
        y_BSH: Tensor = x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))
        return y_BSH


class Llama(nn.Module):
    """Llama decoder, or one pipeline stage of it.

    A stage has fewer layers; embed_tokens, norm and lm_head are None where another stage has them.
    """

    def __init__(self, config: ModelConfig, fp32_norms: bool = False) -> None:
        """Build the modules with uninitialized weights; norms in fp32 if weights are narrower."""
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.embed_tokens: Embedding | None = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(config, fp32_norms) for layer in range(config.num_layers)}
        )
        self.norm: RMSNorm | None = RMSNorm(config.hidden_size, config.rms_norm_eps, fp32_norms)
        untied = not config.tie_embeddings
        self.lm_head = Linear(config.hidden_size, config.vocab_size) if untied else None

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of the output head, [V, H]; that of the embedding if tied."""
        module = self.embed_tokens if self.lm_head is None else self.lm_head
        assert module is not None, "this stage has no head"
        return module.weight

    def forward(
        self,
        tokens_BS: Tensor,
        document_ids_BS: Tensor | None = None,
        x_BSH: Tensor | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """Return the hidden states for the output head or the next stage, y_BSH.

        Args:
            tokens_BS: Token ids, int32 or int64.
            document_ids_BS: Document of each token within its row; attention is limited to the
                document and positions restart at 0 in each. None: each row is one document.
            x_BSH: Output of the previous stage; None: this stage embeds the tokens.
            kv_cache: Keys and values of earlier tokens, updated with those of these tokens; None:
                each row starts a sequence.
        """
        if x_BSH is None:
            assert self.embed_tokens is not None, "this stage requires the output of the previous"
            x_BSH = self.embed_tokens(tokens_BS)
        attn_mask_B1SS = None
        if kv_cache is not None:
            positions_S = kv_cache.positions_BS
            if kv_cache.needs_mask:
                attn_mask_B1SS = build_additive_mask(kv_cache.build_mask(), x_BSH.dtype)
        elif document_ids_BS is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        else:
            mask_BSS = build_document_mask(document_ids_BS)
            positions_S = mask_BSS.sum(-1) - 1  # number of earlier tokens of the document
            attn_mask_B1SS = build_additive_mask(mask_BSS, x_BSH.dtype)
        cos_SD, sin_SD = compute_rope_cos_sin(
            positions_S, self.head_dim, self.rope_theta, x_BSH.dtype
        )
        for name, layer in self.layers.items():
            updates = () if kv_cache is None else (kv_cache.get_layer_update(name),)
            x_BSH = layer(x_BSH, cos_SD, sin_SD, attn_mask_B1SS, *updates)
        y_BSH: Tensor = x_BSH if self.norm is None else self.norm(x_BSH)
        return y_BSH

    def compute_logits(self, tokens_BS: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at each position, [B, S, V]."""
        return F.linear(self(tokens_BS, document_ids_BS), self.lm_head_weight)


def build_document_mask(document_ids_BS: Tensor) -> Tensor:
    """Return the boolean mask mask_BSS of queries over keys (last dimension).

    The mask is causal, and block-diagonal for contiguous documents.
    """
    same_BSS = document_ids_BS.unsqueeze(2) == document_ids_BS.unsqueeze(1)
    return same_BSS.tril()


def build_additive_mask(mask_BSS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return mask_B1SS: 0 where the boolean mask is True, -inf elsewhere.

    Given a boolean mask, torch would convert it in every layer and save each copy for backward.
    """
    additive_BSS = torch.zeros(mask_BSS.shape, dtype=dtype, device=mask_BSS.device)
    return additive_BSS.masked_fill(~mask_BSS, float("-inf")).unsqueeze(1)


def compute_rope_cos_sin(
    positions_S: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    angle_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return cos_SD and sin_SD of the rotary embedding (arXiv 2104.09864).

    Elements i and i + D/2 of a head rotate by position / theta^(2 i / D), the order of Hugging
    Face. Angles are computed in `angle_dtype`, fp32 under the name that the compiler requires.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions_S.device).to(angle_dtype) / head_dim
    angles = positions_S.to(angle_dtype).unsqueeze(-1) * (1.0 / theta**exponents)
    angles_SD = torch.cat((angles, angles), dim=-1)
    return angles_SD.cos().to(dtype), angles_SD.sin().to(dtype)


def apply_rotary_emb(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotate each head by its position."""
    first, second = x_BSND.chunk(2, dim=-1)
    rotated_BSND = torch.cat((-second, first), dim=-1)
    return x_BSND * cos_SD.unsqueeze(-2) + rotated_BSND * sin_SD.unsqueeze(-2)


def _repeat_kv(x_BGSD: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for its query heads; returns [B, N, S, D]."""
    num_repeats = num_heads // x_BGSD.shape[1]
    return x_BGSD.unsqueeze(2).expand(-1, -1, num_repeats, -1, -1).flatten(1, 2)
