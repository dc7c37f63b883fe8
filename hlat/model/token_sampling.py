"""Log probabilities, argmax and samples (temperature, top-p) of the next token, in chunks.

Tensor names end in their dimensions as in loss.py; Q queries, each for one of N rows; T shards of
the vocabulary.
"""

# ruff: noqa: N812

import torch
import torch.nn.functional as F
from torch import Tensor

from hlat.model.embedding_spec import logit_chunk_size
from hlat.model.loss import FULL_VOCAB, VocabShard, compute_logits

RANDOM_RANGE = 1 << 32
"""Exclusive upper bound of the random integers that select a sample."""
_PROBABILITY_ONE = 1 << 30
"""Fixed-point representation of probability one: integer sums are exact in any order, and products
with random integers fit into 63 bits."""
_TEMPERATURE_RANGE = 1e-30, 1e30
"""Temperatures that are neither 0 nor infinite in fp32, with room for the quotient of a logit."""


def compute_log_probs(
    x_NH: Tensor,
    head_VH: Tensor,
    rows_Q: Tensor,
    tokens_Q: Tensor,
    vocab_shard: VocabShard = FULL_VOCAB,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log probabilities of tokens in nats and the argmax of each row; softmax in fp32.

    Args:
        x_NH: Output of the decoder.
        head_VH: Weight of the output head.
        rows_Q: Row of each query, ascending, int64, in host memory.
        tokens_Q: Token of each query, int64.
        vocab_shard: Shard of the vocabulary in head_VH.
        softcap: Limit of the logits (HeadConfig.logit_softcap).

    Returns:
        log_probs_Q, fp32, and argmax_N, int64; the lowest id among equal logits.
    """
    log_probs_Q = torch.empty(len(rows_Q), device=x_NH.device)
    argmax_N = torch.empty(len(x_NH), dtype=torch.int64, device=x_NH.device)
    chunk_size = logit_chunk_size(len(head_VH))
    for start in range(0, len(x_NH), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits_CV = compute_logits(x_NH[chunk], head_VH, softcap).float()
        argmax_N[chunk], max_C = _compute_argmax(logits_CV, vocab_shard)
        bounds = torch.tensor([start, start + chunk_size])
        begin, end = torch.searchsorted(rows_Q, bounds).tolist()
        chunk_rows_Q = rows_Q[begin:end].to(x_NH.device) - start
        columns_Q = tokens_Q[begin:end] - vocab_shard.start_index
        is_local_Q = (columns_Q >= 0) & (columns_Q < logits_CV.shape[1])
        logits_Q = logits_CV[chunk_rows_Q, columns_Q.where(is_local_Q, 0)] - max_C[chunk_rows_Q]
        logits_Q = vocab_shard.all_gather(logits_Q.where(is_local_Q, 0)).sum(0)
        sums_C = logits_CV.sub_(max_C.unsqueeze(1)).exp_().sum(1)
        log_sums_C = vocab_shard.all_gather(sums_C).sum(0).log()
        log_probs_Q[begin:end] = logits_Q - log_sums_C[chunk_rows_Q]
    return log_probs_Q, argmax_N


def select_argmax_tokens(
    x_NH: Tensor,
    head_VH: Tensor,
    vocab_shard: VocabShard = FULL_VOCAB,
    softcap: float | None = None,
) -> Tensor:
    """Return the most likely token of each row, int64; the lowest id among equal logits."""
    chunks = torch.split(x_NH, logit_chunk_size(len(head_VH)))
    logits = (compute_logits(x_CH, head_VH, softcap) for x_CH in chunks)
    return torch.cat([_compute_argmax(logits_CV, vocab_shard)[0] for logits_CV in logits])


def compute_top_log_probs(
    x_NH: Tensor,
    head_VH: Tensor,
    tokens_N: Tensor,
    num_top: int,
    vocab_shard: VocabShard = FULL_VOCAB,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities of tokens, and the most likely tokens, one row each.

    Args:
        x_NH: Output of the decoder.
        head_VH: Weight of the output head.
        tokens_N: Token of each row, int64.
        num_top: Number of most likely tokens, at most the size of the vocabulary.
        vocab_shard: Shard of the vocabulary in head_VH.
        softcap: Limit of the logits (HeadConfig.logit_softcap).

    Returns:
        log_probs_N, and log probabilities and ids of the `num_top` most likely tokens, descending.
    """
    results = []
    chunk_size = logit_chunk_size(len(head_VH))
    for start in range(0, len(x_NH), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits_CV = compute_logits(x_NH[chunk], head_VH, softcap).float()
        log_probs_CV = _gather_logits(logits_CV, vocab_shard).log_softmax(1)
        log_probs_C = log_probs_CV.gather(1, tokens_N[chunk].unsqueeze(1)).squeeze(1)
        results.append((log_probs_C, *log_probs_CV.topk(num_top)))
    log_probs, top_log_probs, top_tokens = zip(*results, strict=True)
    return torch.cat(log_probs), torch.cat(top_log_probs), torch.cat(top_tokens)


def sample_tokens(
    x_NH: Tensor,
    head_VH: Tensor,
    random_bits_N: Tensor,
    temperature_N: Tensor,
    top_p_N: Tensor,
    vocab_shard: VocabShard = FULL_VOCAB,
    softcap: float | None = None,
) -> Tensor:
    """Sample a token id for each row from softmax(logits / temperature), computed in fp32.

    Nucleus sampling (Holtzman et al., arXiv 1904.09751, section 3.1) restricts it to the fewest
    tokens with total probability `top_p`, greater than 0. Probabilities are fixed-point numbers,
    summed in the order of ids, so samples hardly depend on the last bits of logits. The random bits
    are uniform in range(RANDOM_RANGE), int64. Temperatures, greater than 0, are limited to a range
    in which the softmax is finite.
    """
    samples = []
    chunk_size = logit_chunk_size(len(head_VH))
    for start in range(0, len(x_NH), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits_CV = compute_logits(x_NH[chunk], head_VH, softcap).float()
        logits_CV = _gather_logits(logits_CV, vocab_shard)
        # Shift the largest logit to 0, which no temperature scales to infinity
        logits_CV = logits_CV - logits_CV.amax(1, keepdim=True)
        logits_CV /= temperature_N[chunk].clamp(*_TEMPERATURE_RANGE).unsqueeze(1)
        probs_CV = (F.softmax(logits_CV, 1) * _PROBABILITY_ONE).long()
        if (top_p_N < 1).any():
            probs_CV = _filter_top_p(probs_CV, top_p_N[chunk])
        cumulative_CV = probs_CV.cumsum(1)
        threshold_C = cumulative_CV[:, -1] * random_bits_N[chunk] // RANDOM_RANGE
        samples.append((cumulative_CV <= threshold_C.unsqueeze(1)).sum(1))
    return torch.cat(samples)


def _compute_argmax(logits_CV: Tensor, vocab_shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the argmax over the full vocabulary and its logit."""
    max_C, column_C = logits_CV.max(1)
    max_TC = vocab_shard.all_gather(max_C)
    tokens_TC = vocab_shard.all_gather(column_C + vocab_shard.start_index)
    max_C, shard_C = max_TC.max(0)
    return tokens_TC.gather(0, shard_C.unsqueeze(0)).squeeze(0), max_C


def _gather_logits(logits_CV: Tensor, vocab_shard: VocabShard) -> Tensor:
    """Return the logits of the full vocabulary, padded with -inf."""
    padding = max(0, vocab_shard.shard_size - logits_CV.shape[1])
    padded_CV = F.pad(logits_CV, (0, padding), value=float("-inf"))
    return vocab_shard.all_gather(padded_CV).movedim(0, 1).flatten(1)


def _filter_top_p(probs_CV: Tensor, top_p_C: Tensor) -> Tensor:
    """Set fixed-point probabilities outside of the nucleus to 0.

    The most likely token is in every nucleus.
    """
    top_p_C1 = (top_p_C.double() * RANDOM_RANGE).round().long().unsqueeze(1)
    sorted_CV = probs_CV.sort(1, descending=True).values
    before_CV = sorted_CV.cumsum(1) - sorted_CV
    total_C1 = before_CV[:, -1:].add(sorted_CV[:, -1:])
    limit_C1 = (total_C1 * top_p_C1 // RANDOM_RANGE).clamp(min=1)
    in_nucleus_CV = before_CV < limit_C1
    min_C1 = sorted_CV.where(in_nucleus_CV, _PROBABILITY_ONE).amin(1, keepdim=True)
    return probs_CV.where(probs_CV >= min_C1, 0)
