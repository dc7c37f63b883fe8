"""Continuous batching: sequences decoded together, which join and leave between two tokens.

A sequence is prefilled by itself and then joins the batch. Its tokens depend on the other sequences
only through rounding: the random bits depend on its seed, its sample id and the position.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hlat.engine.interface import DecodeState, Engine

MAX_SEQUENCES = 16
"""Maximum number of sequences of a batch."""
MAX_CACHED_TOKENS = 32768
"""Tokens in the KV cache of a batch, unless a single sequence is longer."""
_CAPACITY_STEP = 64
"""Positions by which the KV cache grows, which copies it."""
_ROOT_ROW = np.zeros(1, np.int64)


@dataclass(frozen=True)
class ScoredToken:
    """Token, its log-probability in nats, and those of the most likely tokens by id, descending.

    The log-probability is None for the first token of a sequence, and unless it was requested.
    """

    token: int
    log_prob: float | None = None
    top_log_probs: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class DecodeSequence:
    """Sequence of a batch.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Maximum number of generated tokens.
        temperature: Divisor of the logits; 0: greedy decoding.
        top_p: Probability mass of nucleus sampling.
        seed: Seed of the random bits.
        sample_id: Id that selects other random bits of the same seed.
        num_top: Number of most likely tokens in the scores; None: no log-probabilities.
        score_prompt: Also return the scores of the prompt.
        tokens: Generated tokens.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    sample_id: int = 0
    num_top: int | None = None
    score_prompt: bool = False
    tokens: list[int] = field(default_factory=list)

    @cached_property
    def random_bits(self) -> NDArray[np.int64]:
        """Random bits of each token; computed after the sequence has joined a batch."""
        return derive_random_bits(self.seed, self.sample_id, self.max_tokens)


class DecodeBatch:
    """Sequences that are decoded together; a sequence leaves after its last token."""

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine after `build`; its weights must not change while there are sequences."""
        self._engine = engine
        self._state: DecodeState | None = None
        self._rows: list[DecodeSequence | None] = []
        """Sequence of each row of the state; None if it has left."""
        self._joining: dict[DecodeSequence, DecodeState] = {}
        self._num_free_positions = 0

    @property
    def sequences(self) -> list[DecodeSequence]:
        """Sequences of which `step` generates the next token, in its order."""
        return [*(sequence for sequence in self._rows if sequence is not None), *self._joining]

    def has_room(self, sequence: DecodeSequence) -> bool:
        """Return True if the sequence fits into the batch."""
        sequences = [*self.sequences, sequence]
        longest = max(len(one.prompt) + one.max_tokens for one in sequences)
        return len(sequences) == 1 or (
            len(sequences) <= MAX_SEQUENCES and len(sequences) * longest <= MAX_CACHED_TOKENS
        )

    def add(self, sequence: DecodeSequence) -> tuple[list[ScoredToken], ScoredToken | None]:
        """Prefill a sequence.

        Returns:
            Scores of the prompt, if requested, and the first token, None if `max_tokens` is 0.
        """
        prompt = np.array(sequence.prompt, np.int32)
        state = self._engine.create_decode_state().select(_ROOT_ROW, len(prompt))
        state.append(prompt[None], np.array([len(prompt)]))
        scores = []
        if sequence.score_prompt and sequence.num_top is not None:
            positions = np.arange(len(prompt) - 1)
            rows = np.zeros_like(positions)
            scores = _score(state, rows, positions, prompt[1:], sequence.num_top)
            scores.insert(0, ScoredToken(sequence.prompt[0]))
        if not sequence.max_tokens:
            return scores, None
        self._joining[sequence] = state
        [token] = self._sample(state, [sequence], len(prompt) - 1)
        return scores, token

    def remove(self, sequence: DecodeSequence) -> None:
        """Remove a sequence unless it has left."""
        self._joining.pop(sequence, None)
        self._rows = [None if one is sequence else one for one in self._rows]

    def step(self) -> list[tuple[DecodeSequence, ScoredToken]]:
        """Return the next token of each sequence."""
        self._update_state()
        if self._state is None:
            return []
        sequences = self.sequences
        tokens = np.array([[sequence.tokens[-1]] for sequence in sequences], np.int32)
        self._state.append(tokens, np.ones(len(sequences), np.int64))
        self._num_free_positions -= 1
        return list(zip(sequences, self._sample(self._state, sequences, 0), strict=True))

    def _update_state(self) -> None:
        """Drop rows of sequences that have left, add those that join, and extend the KV cache."""
        if self._num_free_positions and not self._joining and None not in self._rows:
            return
        kept = [row for row, sequence in enumerate(self._rows) if sequence is not None]
        states = list(self._joining.values())
        if kept:
            assert self._state is not None
            states.insert(0, self._state.select(np.array(kept), 0))
        self._rows, self._joining = list(self.sequences), {}
        self._state = states[0].concat(states[1:], _CAPACITY_STEP) if states else None
        self._num_free_positions = _CAPACITY_STEP if states else 0

    def _sample(
        self, state: DecodeState, sequences: list[DecodeSequence], position: int
    ) -> list[ScoredToken]:
        """Sample the next token of each row; `position` is that of the last `append`."""
        rows = np.arange(len(sequences))
        tokens = state.sample(
            rows,
            np.array([one.random_bits[len(one.tokens)] for one in sequences]),
            np.array([one.temperature for one in sequences], np.float64),
            np.array([one.top_p for one in sequences], np.float64),
        )
        scored = [ScoredToken(token) for token in tokens.tolist()]
        if requested := [row for row in rows.tolist() if sequences[row].num_top is not None]:
            num_top = max(sequences[row].num_top or 0 for row in requested)
            positions = np.full(len(requested), position)
            scores = _score(state, np.array(requested), positions, tokens[requested], num_top)
            for row, score in zip(requested, scores, strict=True):
                top = itertools.islice(score.top_log_probs.items(), sequences[row].num_top)
                scored[row] = replace(score, top_log_probs=dict(top))
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.max_tokens:
                self.remove(sequence)
        return scored


def derive_random_bits(seed: int, sample_id: int, count: int) -> NDArray[np.int64]:
    """Return 32 random bits for each position of a sequence."""
    key = hashlib.blake2b(f"{seed} {sample_id}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.integers(0, 1 << 32, count, np.int64)


def _score(
    state: DecodeState,
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    tokens: NDArray[np.integer],
    num_top: int,
) -> list[ScoredToken]:
    """Return tokens with their log-probabilities."""
    if not len(rows):
        return []
    log_probs, top_log_probs, top_tokens = state.compute_top_log_probs(
        rows, positions, tokens.astype(np.int64), num_top
    )
    tops = zip(top_tokens.tolist(), top_log_probs.tolist(), strict=True)
    return [
        ScoredToken(token, log_prob, dict(zip(*top, strict=True)))
        for token, log_prob, top in zip(tokens.tolist(), log_probs.tolist(), tops, strict=True)
    ]
