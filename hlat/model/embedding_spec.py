"""Specification of the token embedding and the output head, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlat.config.bounds import bounded
from hlat.model.activation_spec import ExecutionSettings, KernelBackend
from hlat.model.parameter_spec import (
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


EMBEDDING_NAME = "embed_tokens.weight"
"""Module parameter that the first and the last pipeline stage have if the head is tied."""


@dataclass
class EmbeddingConfig:
    """Token embedding."""

    multiplier: float = bounded(1.0, above=0, below=float("inf"))
    """Factor of the embeddings (muP, Granite)."""
    scale_by_sqrt_hidden: bool = False
    """Also multiply the embeddings by sqrt(hidden_size) (Gemma)."""


@dataclass
class HeadConfig:
    """Output head and loss; model.tie_embeddings selects its weight."""

    logit_softcap: float | None = bounded(None, above=0, below=float("inf"))
    """Limit the logits to this value by c * tanh(logit / c) (Gemma 2); null: no limit."""
    z_loss: float = bounded(0.0, min=0, below=float("inf"))
    """Weight of the square of log(sum(exp(logits))) in the training objective (PaLM, arXiv
    2204.02311, section 5). Logged losses are cross-entropies without it."""


def compute_embedding_scale(model: ModelConfig) -> float:
    """Return the factor of the embeddings."""
    settings = model.embedding
    scale = math.sqrt(model.hidden_size) if settings.scale_by_sqrt_hidden else 1.0
    return settings.multiplier * scale


def build_embedding(model: ModelConfig) -> ModuleParameter:
    """Return the weight of the token embedding."""
    return _build(model, EMBEDDING_NAME, "model.embed_tokens.weight", "embedding")


def build_head(model: ModelConfig) -> ModuleParameter | None:
    """Return the weight of the output head; None if it is that of the embedding."""
    if model.tie_embeddings:
        return None
    return _build(model, "lm_head.weight", "lm_head.weight", "head")


def compute_logit_bytes(model: ModelConfig, num_tokens: int, execution: ExecutionSettings) -> float:
    """Return the bytes of the logits of a micro batch and of the gradient of the head.

    Logits are computed in chunks and become their gradient in place, or via an fp32 copy. The
    gradient of the head is accumulated over chunks in the same dtype, then rounded. A soft-cap
    needs tanh, its square, the result and its derivative. NxD computes all logits at once, and
    stores them and their gradient in the dtype of the loss.
    """
    compute, loss = execution.compute_itemsize, execution.loss_itemsize
    width, head = (
        model.vocab_size / execution.tp,
        model.vocab_size * model.hidden_size / execution.tp,
    )
    if execution.kernels is KernelBackend.xla:
        return num_tokens * width * (compute + 2 * loss) + head * compute
    num_rows = min(num_tokens, logit_chunk_size(int(width)))
    cast = loss if loss > compute else 0
    softcap = 0 if model.head.logit_softcap is None else 4 * loss
    return num_rows * width * (compute + cast + softcap) + head * (compute + cast)


def logit_chunk_size(num_tokens: int) -> int:
    """Return the number of positions whose logits are computed at once for a (local) vocabulary.

    From 512 positions on, the GEMM of the head runs at full speed for any vocabulary. A
    tensor-parallel shard of the vocabulary uses more, since each chunk costs collectives.
    """
    return max(512, (1 << 21) // num_tokens)


def _build(model: ModelConfig, name: str, canonical: str, role: str) -> ModuleParameter:
    shape = (model.vocab_size, model.hidden_size)
    spec = ParameterSpec(canonical, shape, ParameterRole(role), ShardingRule.vocabulary)
    return ModuleParameter(name, (spec,))
