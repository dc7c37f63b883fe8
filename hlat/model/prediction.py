"""What the output head says of the token after some positions, a few rows of logits at a time.

The loss wants one number of all positions. Who scores or writes texts asks of few positions how
likely given tokens are, which one is the likeliest, or for one that is drawn.

Names end in dimensions as in loss.py; Q questions, each about one of N rows.
"""

# ruff: noqa: N812  F is what the field calls it.

import torch
import torch.nn.functional as F
from torch import Tensor

from hlat.model.canonical import rows_at_once
from hlat.model.loss import WHOLE, Vocabulary

CHANCES = 1 << 32
"""A draw is decided by one of so many whole numbers."""
_UNITS = 1 << 30
"""What a probability of one counts for: sums of whole numbers are exact in any order, and their
product with a chance fits into 63 bits."""


def log_probs(
    x_NH: Tensor,
    head_VH: Tensor,
    rows_Q: Tensor,
    tokens_Q: Tensor,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor]:
    """How likely tokens are, in nats, and which token is the likeliest; softmax in fp32.

    Args:
        x_NH: What the decoder returns.
        head_VH: The output head.
        rows_Q: The row that each question is about, ascending, int64, in the host's memory.
        tokens_Q: The token that it asks for, int64.
        vocabulary: Which tokens the head holds.

    Returns:
        log_probs_Q, fp32, and likeliest_N, int64: of equal ones that with the lowest id.
    """
    found_Q = torch.empty(len(rows_Q), device=x_NH.device)
    likeliest_N = torch.empty(len(x_NH), dtype=torch.int64, device=x_NH.device)
    rows = rows_at_once(len(head_VH))
    for start in range(0, len(x_NH), rows):
        chunk = slice(start, start + rows)
        logits_CV = F.linear(x_NH[chunk], head_VH).float()
        likeliest_N[chunk], largest_C = _likeliest(logits_CV, vocabulary)
        ends = torch.tensor([start, start + rows])
        begin, end = torch.searchsorted(rows_Q, ends).tolist()
        asked_Q = rows_Q[begin:end].to(x_NH.device) - start
        places_Q = tokens_Q[begin:end] - vocabulary.first
        here_Q = (places_Q >= 0) & (places_Q < logits_CV.shape[1])
        own_Q = logits_CV[asked_Q, places_Q.where(here_Q, 0)] - largest_C[asked_Q]
        own_Q = vocabulary.stack(own_Q.where(here_Q, 0)).sum(0)
        sums_C = logits_CV.sub_(largest_C.unsqueeze(1)).exp_().sum(1)
        found_Q[begin:end] = own_Q - vocabulary.stack(sums_C).sum(0).log()[asked_Q]
    return found_Q, likeliest_N


def likeliest(x_NH: Tensor, head_VH: Tensor, vocabulary: Vocabulary = WHOLE) -> Tensor:
    """The likeliest token of each row, of equal ones that with the lowest id; int64."""
    chunks = torch.split(x_NH, rows_at_once(len(head_VH)))
    return torch.cat([_likeliest(F.linear(x_CH, head_VH), vocabulary)[0] for x_CH in chunks])


def draw(
    x_NH: Tensor,
    head_VH: Tensor,
    chances_N: Tensor,
    temperature: float,
    top_p: float,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Draw a token for each row from softmax(logits / temperature), in fp32.

    Only the likeliest tokens are drawn, as few as hold `top_p` together (Holtzman et al.,
    arXiv 1904.09751, section 3.1). Probabilities are counted in whole units and their sums run in
    the order of ids, so that what is drawn hardly depends on the last bits of logits.

    Args:
        x_NH: What the decoder returns.
        head_VH: The output head.
        chances_N: What decides each draw: uniform in range(CHANCES), int64.
        temperature: More than 0.
        top_p: More than 0, at most 1.
        vocabulary: Which tokens the head holds.

    Returns:
        Token ids, int64.
    """
    drawn = []
    rows = rows_at_once(len(head_VH))
    for start in range(0, len(x_NH), rows):
        chunk = slice(start, start + rows)
        logits_CV = _whole(F.linear(x_NH[chunk], head_VH).float(), vocabulary)
        units_CV = (F.softmax(logits_CV / temperature, 1) * _UNITS).long()
        if top_p < 1:
            units_CV = _nucleus(units_CV, top_p)
        sums_CV = units_CV.cumsum(1)
        aims_C1 = (sums_CV[:, -1] * chances_N[chunk] // CHANCES).unsqueeze(1)
        drawn.append((sums_CV <= aims_C1).sum(1))
    return torch.cat(drawn)


def _likeliest(logits_CV: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and its logit."""
    largest_C, place_C = logits_CV.max(1)
    largest_TC = vocabulary.stack(largest_C)
    tokens_TC = vocabulary.stack(place_C + vocabulary.first)
    largest_C, holder_C = largest_TC.max(0)
    return tokens_TC.gather(0, holder_C.unsqueeze(0)).squeeze(0), largest_C


def _whole(logits_CV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Logits of all tokens; minus infinity where there is no token."""
    missing = max(0, vocabulary.width - logits_CV.shape[1])
    padded_CV = F.pad(logits_CV, (0, missing), value=float("-inf"))
    return vocabulary.stack(padded_CV).movedim(0, 1).flatten(1)


def _nucleus(units_CV: Tensor, top_p: float) -> Tensor:
    """The units of the likeliest tokens that hold `top_p` of all, 0 for the others."""
    falling_CV = units_CV.sort(1, descending=True).values
    before_CV = falling_CV.cumsum(1) - falling_CV
    share = round(top_p * CHANCES)
    needed_CV = before_CV < before_CV[:, -1:].add(falling_CV[:, -1:]) * share // CHANCES
    least_C1 = falling_CV.where(needed_CV, _UNITS).amin(1, keepdim=True)
    return units_CV.where(units_CV >= least_C1, 0)
