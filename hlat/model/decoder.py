"""Decoder-only transformer: token ids to the hidden states that the output head reads.

The decoder stacks the components in attention.py, mlp.py, norm.py and rope.py, whose settings and
parameters are in the files *_spec.py. The module contains no process group, mesh or engine. Rows of
the fused projections (q/k/v, gate/up) are ordered such that consecutive rows, cut between groups,
are a valid tensor-parallel shard; reshapes use -1, so the same code runs on a shard with fewer
heads. Construction initializes no weights, so a model on the meta device costs nothing.

Tensor names end in their dimensions: B sequences, S tokens, H hidden, V vocabulary, I intermediate,
D head size, G key/value heads (groups), R query heads per group, N = G R query heads, T = R + 2
heads of a group with its key and value. With a document mask or sequences of different lengths,
positions_S, cos_SD and sin_SD have a leading B. With a KV cache there are more keys than queries.
"""

import torch
from torch import Tensor, nn

from hlat.config.components import get_implementation
from hlat.config.model import ModelConfig
from hlat.model import moe as moe  # registers its implementation
from hlat.model.attention import Attention
from hlat.model.attention_kernels import KeyRange, build_masks, compute_document_starts
from hlat.model.attention_spec import LayerType, get_layer_type, get_window
from hlat.model.embedding_spec import compute_embedding_scale
from hlat.model.kv_cache import KVCache, KVCacheUpdate
from hlat.model.linear import Embedding, Linear
from hlat.model.loss import compute_logits
from hlat.model.mlp import MLP
from hlat.model.mlp_spec import get_layer_mlp_kind
from hlat.model.norm import build_norm
from hlat.model.norm_spec import NORM_NAMES
from hlat.model.parametrization_spec import (
    compute_output_multiplier,
    compute_residual_multiplier,
)
from hlat.model.rope import RopeCosSin, compute_rope_cos_sin
from hlat.model.rope_spec import has_rope


class DecoderLayer(nn.Module):
    """Attention and MLP with residual connections and norms before or after each."""

    def __init__(self, model: ModelConfig, layer: int, fp32_norms: bool) -> None:
        super().__init__()
        self.has_rope = has_rope(model, layer)
        self.is_sliding = get_layer_type(model, layer) is LayerType.sliding
        self.residual_multiplier = compute_residual_multiplier(model)
        self.norm_names = NORM_NAMES[model.norm.placement]
        for name in self.norm_names:
            if name is not None:
                self.add_module(name, build_norm(model, fp32_norms))
        attention = get_implementation("model.attention", model.attention.kind)
        self.self_attn: Attention = attention(model, layer, fp32_norms)
        kind = get_layer_mlp_kind(model, layer)
        self.mlp: MLP = get_implementation("model.mlp", kind)(model)

    def forward(
        self,
        x_BSH: Tensor,
        cos_sin: RopeCosSin | None,
        key_range: KeyRange | None = None,
        update_kv_cache: KVCacheUpdate | None = None,
    ) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        y_BSH = self.self_attn(
            self._normalize(before_attention, x_BSH), cos_sin, key_range, update_kv_cache
        )
        x_BSH = self._add(x_BSH, self._normalize(after_attention, y_BSH))
        y_BSH = self.mlp(self._normalize(before_mlp, x_BSH))
        return self._add(x_BSH, self._normalize(after_mlp, y_BSH))

    def _normalize(self, name: str | None, x_BSH: Tensor) -> Tensor:
        """Apply the norm at one of the four places, if there is one."""
        if name is None:
            return x_BSH
        y_BSH: Tensor = getattr(self, name)(x_BSH)
        return y_BSH

    def _add(self, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
        if self.residual_multiplier == 1:
            return x_BSH + y_BSH
        return torch.add(x_BSH, y_BSH, alpha=self.residual_multiplier)


class Decoder(nn.Module):
    """Decoder-only transformer, or one pipeline stage of it.

    A stage has fewer layers; embed_tokens, norm and lm_head are None where another stage has them.
    A last stage with a tied head has its own copy of embed_tokens.
    """

    def __init__(self, model: ModelConfig, fp32_norms: bool = False) -> None:
        """Build the modules with uninitialized weights; norms in fp32 if weights are narrower."""
        super().__init__()
        self.config, self.embedding_scale = model, compute_embedding_scale(model)
        self.output_multiplier = compute_output_multiplier(model)
        layers = range(model.num_layers)
        self.windows = {get_window(model, layer) for layer in layers}
        self.embed_tokens: Embedding | None = Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(model, layer, fp32_norms)
                for layer in range(model.num_layers)
            }
        )
        self.norm: nn.Module | None = build_norm(model, fp32_norms)
        self.lm_head: Linear | None = None
        if not model.tie_embeddings:
            self.lm_head = Linear(model.hidden_size, model.vocab_size, bias=False)

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
            if self.embedding_scale != 1:
                x_BSH = x_BSH * torch.tensor(self.embedding_scale, dtype=x_BSH.dtype)
        num_keys = tokens_BS.shape[1]
        positions_S = torch.arange(num_keys, device=tokens_BS.device)
        key_range = None
        if kv_cache is not None:
            positions_S, key_range = kv_cache.positions_BS, kv_cache.build_key_range()
            num_keys = kv_cache.num_visible_positions
        elif document_ids_BS is not None:
            starts_BS = compute_document_starts(document_ids_BS)
            positions_S, key_range = positions_S - starts_BS, KeyRange(starts_BS)
        shape_BSK = len(tokens_BS), tokens_BS.shape[1], num_keys
        key_range = build_masks(key_range, self.windows, shape_BSK, x_BSH.dtype, x_BSH.device)
        rope = self._compute_rope(positions_S, x_BSH.dtype)
        for name, layer in self.layers.items():
            assert isinstance(layer, DecoderLayer)
            cos_sin = rope[layer.is_sliding] if layer.has_rope else None
            updates = () if kv_cache is None else (kv_cache.get_layer_update(name),)
            x_BSH = layer(x_BSH, cos_sin, key_range, *updates)
        if self.norm is None:
            return x_BSH
        y_BSH: Tensor = self.norm(x_BSH)
        return y_BSH if self.output_multiplier == 1 else y_BSH * self.output_multiplier

    def compute_logits(self, tokens_BS: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at each position, [B, S, V]."""
        softcap = self.config.head.logit_softcap
        return compute_logits(self(tokens_BS, document_ids_BS), self.lm_head_weight, softcap)

    def _compute_rope(self, positions_S: Tensor, dtype: torch.dtype) -> dict[bool, RopeCosSin]:
        """Return cosines and sines by whether a layer is sliding."""
        full = compute_rope_cos_sin(self.config, positions_S, dtype)
        if self.config.rope.sliding_theta is None:
            return {False: full, True: full}
        return {False: full, True: compute_rope_cos_sin(self.config, positions_S, dtype, True)}
