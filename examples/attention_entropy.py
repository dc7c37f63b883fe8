"""Metric: entropy of causal attention in nats, by layer, without masks of documents and windows.

hlat train extensions=[examples/attention_entropy.py] tracking.metrics=[attention_entropy]
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hlat.config.components import register_component
from hlat.model.decoder import Decoder


def observe(part: Decoder, record: Callable[[str, Tensor], None]) -> Iterator[RemovableHandle]:
    """Record the entropy of each query of each head in each layer."""
    for name, layer in part.layers.items():
        hook = partial(_record_entropy, record, f"layer_{name}")
        yield layer.self_attn.core.register_forward_hook(hook)


def _record_entropy(
    record: Callable[[str, Tensor], None],
    name: str,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    q_BNSD, k_BGSD = (x.float() for x in inputs[:2])
    k_BNSD = k_BGSD.repeat_interleave(q_BNSD.shape[1] // k_BGSD.shape[1], 1)
    scores_BNSS = q_BNSD @ k_BNSD.transpose(2, 3) / math.sqrt(q_BNSD.shape[-1])
    is_later_SS = torch.ones_like(scores_BNSS[0, 0], dtype=torch.bool).triu(1)
    log_p_BNSS = scores_BNSS.masked_fill(is_later_SS, -torch.inf).log_softmax(-1)
    record(name, -(log_p_BNSS.exp() * log_p_BNSS.masked_fill(is_later_SS, 0)).sum(-1))


register_component(
    "tracking", "attention_entropy", "Entropy of attention in nats.", implementation=observe
)
