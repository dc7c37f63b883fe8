"""Decoding loop of text generation: sample the next tokens, append them to the KV cache, repeat.

All sequences of a batch start together. decode_batch.py is the loop of the server, whose sequences
join and leave the batch at any time.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hlat.engine.interface import Engine

_ROOT_ROW = np.zeros(1, np.int64)


def run_decoding_loop(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    random_bits: NDArray[np.int64],
    is_finished: Callable[[list[int]], bool],
    temperature: float,
    top_p: float,
) -> list[list[int]]:
    """Generate until all sequences are finished or have the length of `random_bits`, [n, s].

    Equal prompts are prefilled once. When half of the sequences in the KV cache have finished, they
    leave it.
    """
    unique, max_new_tokens = sorted(set(prompts)), random_bits.shape[1]
    tokens, lengths = pad_tokens(unique)
    state = engine.create_decode_state().select(_ROOT_ROW.repeat(len(unique)), tokens.shape[1])
    state.append(tokens, lengths)
    rows = np.array([unique.index(prompt) for prompt in prompts])
    generated: list[list[int]] = [[] for _ in prompts]
    cached = active = np.arange(len(prompts))  # sequences with a row in the KV cache; unfinished
    for position in range(1, max_new_tokens + 1):
        sampled = state.sample(
            rows,
            random_bits[active, position - 1],
            np.full(len(rows), temperature),
            np.full(len(rows), top_p),
        )
        for i, token in zip(active.tolist(), sampled.tolist(), strict=True):
            generated[i].append(token)
        is_active = [not is_finished(generated[i]) for i in active]
        active, sampled = active[is_active], sampled[is_active]
        if not len(active) or position == max_new_tokens:
            break
        if position == 1:  # one row for each prompt in place of each unique one
            state = state.select(rows, max_new_tokens)
        if 2 * len(active) <= len(cached):
            state = state.select(np.searchsorted(cached, active), max_new_tokens - position)
            cached = active
        rows = np.searchsorted(cached, active)
        tokens = np.zeros((len(cached), 1), np.int32)
        tokens[rows, 0] = sampled
        state.append(tokens, np.ones(len(cached), np.int64))
    return generated


def pad_tokens(
    sequences: Sequence[tuple[int, ...]],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return token ids padded with zeros, [n, s], and the lengths, [n]."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    tokens = np.zeros((len(sequences), lengths.max()), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, lengths
