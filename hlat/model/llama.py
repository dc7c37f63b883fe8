"""The Llama decoder as mathematics: tokens in, what the output head reads out.

No process group, mesh or engine is mentioned. The coalesced projections (q/k/v, gate/up) are laid
out so that consecutive rows, cut between groups, are a correct tensor-parallel shard, and reshapes
use -1, so the same code runs on a shard with fewer heads. Nothing is drawn or stored at
construction, so a model on the meta device costs nothing.

Tensor names end in their dimensions: B sequences, S tokens, H hidden, V vocabulary, I intermediate,
D head size, G key/value heads (groups), R query heads per group, N = G R query heads, T = R + 2
heads of a group with its key and value. Where positions restart in each document, positions_S,
cos_SD and sin_SD have a B in front; so they have where texts go on that are not equally long, and
keys are then more than queries: those of past.py before them.
"""

# ruff: noqa: N812  F is what the field calls it.

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.model import Model
from hlat.model.coalesced import gate_up_block
from hlat.model.operators import rms_norm, swiglu
from hlat.model.past import Keep, Past


class Linear(nn.Linear):
    """A linear map without bias, and without nn.Linear's own initial values."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw nothing: initial values depend on canonical names, see initialise.py."""


class Embedding(nn.Embedding):
    """An embedding without nn.Embedding's own initial values."""

    def reset_parameters(self) -> None:
        """Draw nothing: initial values depend on canonical names, see initialise.py."""


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization, of bf16 in fp32 if asked to."""

    eps: float

    def __init__(self, size: int, eps: float, fp32: bool) -> None:
        super().__init__(size, eps)
        self.fp32 = fp32

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Scale each position to a mean square of one, then each element by its weight."""
        if x_BSH.is_cpu:  # where torch has no kernel for it
            return rms_norm(x_BSH, self.weight, self.eps)
        if not self.fp32:
            return super().forward(x_BSH)
        y_BSH = F.rms_norm(x_BSH.float(), self.normalized_shape, self.weight.float(), self.eps)
        return y_BSH.to(x_BSH.dtype)


class CoreAttention(nn.Module):
    """Causal softmax attention; a module, so that selective recomputation can wrap it."""

    def forward(
        self, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_B1SS: Tensor | None = None
    ) -> Tensor:
        """Attend to this and earlier positions, scores scaled by 1 / sqrt(D); returns y_BNSD.

        A bias is added to the scores and takes the place of the causal mask. Without one, queries
        that are fewer than keys attend to all of them.
        """
        grouped = q_BNSD.shape[1] != k_BGSD.shape[1]
        goes_on = q_BNSD.shape[2] < k_BGSD.shape[2]
        if bias_B1SS is None:
            return F.scaled_dot_product_attention(
                q_BNSD, k_BGSD, v_BGSD, is_causal=not goes_on, enable_gqa=grouped
            )
        if goes_on:  # from the past, through which no gradient goes back
            return F.scaled_dot_product_attention(
                q_BNSD, k_BGSD, v_BGSD, attn_mask=bias_B1SS, enable_gqa=grouped
            )
        # On a GPU torch's only fused attention with both a bias and deterministic gradients, the
        # memory efficient one, knows no groups on ROCm and in older releases (aten's sdp_utils.cpp)
        k_BNSD, v_BNSD = (_serve(x, q_BNSD.shape[1]) if grouped else x for x in (k_BGSD, v_BGSD))
        return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, attn_mask=bias_B1SS)


class Attention(nn.Module):
    """Grouped-query self-attention; qkv_proj's rows are, group by group: queries, key, value."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim, self.queries_per_group = model.head_dim, model.queries_per_group
        heads = model.num_attention_heads + 2 * model.num_key_value_heads
        self.qkv_proj = Linear(model.hidden_size, heads * model.head_dim)
        self.core = CoreAttention()
        self.o_proj = Linear(model.hidden_size, model.hidden_size)

    def forward(
        self,
        x_BSH: Tensor,
        cos_SD: Tensor,
        sin_SD: Tensor,
        bias_B1SS: Tensor | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """Mix information between positions; returns [B, S, H]."""
        heads = (-1, self.queries_per_group + 2, self.head_dim)
        qkv_BSGTD = torch.unflatten(self.qkv_proj(x_BSH), -1, heads)
        q_BSGRD, k_BSG1D, v_BSG1D = torch.split(qkv_BSGTD, [self.queries_per_group, 1, 1], dim=-2)
        q_BSND = rotate(q_BSGRD.flatten(2, 3), cos_SD, sin_SD)
        k_BSGD = rotate(k_BSG1D.flatten(2, 3), cos_SD, sin_SD)
        v_BSGD = v_BSG1D.flatten(2, 3)
        q_BNSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGD))
        if keep is not None:
            k_BGSD, v_BGSD = keep(k_BGSD, v_BGSD)
        y_BNSD = self.core(q_BNSD, k_BGSD, v_BGSD, bias_B1SS)
        y_BSH: Tensor = self.o_proj(y_BNSD.transpose(1, 2).flatten(2))
        return y_BSH


class SwiGLU(nn.Module):
    """silu(gate) * up of alternating blocks; a module, for selective recomputation to wrap."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, blocks_BS2I: Tensor) -> Tensor:
        """Multiply each gate with its up; [B, S, 2 I] to [B, S, I]."""
        return swiglu(blocks_BS2I, self.block)


class MLP(nn.Module):
    """The SwiGLU feed-forward network; gate_up_proj's rows are blocks of gates, ups, in turn."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_up_proj = Linear(model.hidden_size, 2 * model.intermediate_size)
        self.swiglu = SwiGLU(gate_up_block(model))
        self.down_proj = Linear(model.intermediate_size, model.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Transform each position; returns [B, S, H]."""
        y_BSH: Tensor = self.down_proj(self.swiglu(self.gate_up_proj(x_BSH)))
        return y_BSH


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, model: Model, fp32_norms: bool) -> None:
        super().__init__()
        norm = (model.hidden_size, model.rms_norm_eps, fp32_norms)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = MLP(model)

    def forward(
        self,
        x_BSH: Tensor,
        cos_SD: Tensor,
        sin_SD: Tensor,
        bias_B1SS: Tensor | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """Add attention, then the feed-forward network, to the residual stream."""
        normed_BSH = self.input_layernorm(x_BSH)
        x_BSH = x_BSH + self.self_attn(normed_BSH, cos_SD, sin_SD, bias_B1SS, keep)
        y_BSH: Tensor = x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))
        return y_BSH


class Llama(nn.Module):
    """The whole decoder; or, of one that is cut into parts, one of them.

    A part has a model's modules but for those that it leaves to others: embed_tokens, norm and
    lm_head are then None, and layers holds fewer.
    """

    def __init__(self, model: Model, fp32_norms: bool = False) -> None:
        """Make the modules; their weights are whatever memory holds.

        Args:
            model: Shape of the model.
            fp32_norms: Whether norms are computed in fp32 where weights are narrower.
        """
        super().__init__()
        self.head_dim, self.rope_theta = model.head_dim, model.rope_theta
        self.embed_tokens: Embedding | None = Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict(
            {str(layer): Layer(model, fp32_norms) for layer in range(model.num_layers)}
        )
        self.norm: RMSNorm | None = RMSNorm(model.hidden_size, model.rms_norm_eps, fp32_norms)
        untied = not model.tie_embeddings
        self.lm_head = Linear(model.hidden_size, model.vocab_size) if untied else None

    @property
    def head(self) -> Tensor:
        """Weight of the output head, [V, H]; the embedding's if they are tied."""
        module = self.embed_tokens if self.lm_head is None else self.lm_head
        assert module is not None, "this part has no head"
        return module.weight

    def forward(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None = None,
        x_BSH: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """What the output head, or the part after this one, reads at each position.

        Args:
            tokens_BS: Token ids, int32 or int64.
            documents_BS: Which document of its row each token belongs to; attention then stays
                inside a document and positions restart at 0 in each. Without, a row is one text.
            x_BSH: What the part before this one gave; None: this one embeds the tokens.
            past: What the layers have kept of the tokens before these ones, and are to keep of
                these; None: a row begins a text, and nothing is kept.

        Returns:
            y_BSH in the dtype of the weights.
        """
        if x_BSH is None:
            assert self.embed_tokens is not None, "this part needs what the one before it gave"
            x_BSH = self.embed_tokens(tokens_BS)
        bias_B1SS = None
        if past is not None:
            positions_S = past.positions_BS
            if past.masked:
                bias_B1SS = attention_bias(past.visible(), x_BSH.dtype).unsqueeze(1)
        elif documents_BS is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        else:
            visible_BSS = within_documents(documents_BS)
            positions_S = visible_BSS.sum(-1) - 1  # as many tokens as it sees before itself
            bias_B1SS = attention_bias(visible_BSS, x_BSH.dtype).unsqueeze(1)
        cos_SD, sin_SD = rotations(positions_S, self.head_dim, self.rope_theta, x_BSH.dtype)
        for name, layer in self.layers.items():
            kept = () if past is None else (past.of(name),)
            x_BSH = layer(x_BSH, cos_SD, sin_SD, bias_B1SS, *kept)
        y_BSH: Tensor = x_BSH if self.norm is None else self.norm(x_BSH)
        return y_BSH

    def logits(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Logits of the token after each position, [B, S, V]; training never makes all of them."""
        return F.linear(self(tokens_BS, documents_BS), self.head)


def within_documents(documents_BS: Tensor) -> Tensor:
    """Which key (last dimension) each query sees: itself and the earlier tokens of its document.

    Returns:
        visible_BSS, bool: causal, and block-diagonal where a document's tokens are neighbours.
    """
    same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    return same_BSS.tril()


def attention_bias(visible_BSS: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch makes of a boolean mask: 0 where it is true, minus infinity elsewhere.

    Left to torch, every layer would make its own and keep it for the backward pass.
    """
    bias = torch.zeros(visible_BSS.shape, dtype=dtype, device=visible_BSS.device)
    return bias.masked_fill(~visible_BSS, float("-inf"))


def rotations(
    positions_S: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    wide: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos_SD and sin_SD of the rotary embedding (arXiv 2104.09864), then cast.

    Element i and i + D/2 of a head turn by position / theta^(2 i / D): Hugging Face's order of the
    halves. Computed in `wide`: fp32, under whatever name a compiler gives it.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions_S.device).to(wide) / head_dim
    angles = positions_S.to(wide).unsqueeze(-1) * (1.0 / theta**exponents)
    angles_SD = torch.cat((angles, angles), dim=-1)
    return angles_SD.cos().to(dtype), angles_SD.sin().to(dtype)


def rotate(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Turn each head by its position."""
    first, second = x_BSND.chunk(2, dim=-1)
    turned_BSND = torch.cat((-second, first), dim=-1)
    return x_BSND * cos_SD.unsqueeze(-2) + turned_BSND * sin_SD.unsqueeze(-2)


def _serve(x_BGSD: Tensor, num_heads: int) -> Tensor:
    """Repeat each group's head for the query heads that share it; returns [B, N, S, D]."""
    per_group = num_heads // x_BGSD.shape[1]
    return x_BGSD.unsqueeze(2).expand(-1, -1, per_group, -1, -1).flatten(1, 2)
