"""Log-probabilities and generation of token sequences with the model of an engine, in batches.

Sequences are sorted and batched here, and shared prefixes are computed once. The decoding loop of a
batch is in decoding_loop.py. Results depend on other requests, batches and the layout only through
rounding; samples depend only on the seed, the sample id and the position.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hlat.distributed.object_group import broadcast_object
from hlat.distributed.parallel_state import ParallelState
from hlat.engine.interface import DecodeState, Engine
from hlat.inference.decode_batch import DecodeBatch, derive_random_bits
from hlat.inference.decoding_loop import pad_tokens, run_decoding_loop

if TYPE_CHECKING:
    from hlat.data.prompt_tokenizer import PromptTokenizer

MAX_BATCH_TOKENS = 8192
"""Tokens in the KV cache of a batch, unless a single sequence is longer."""
_MAX_TRUNCATED_BYTES = 3
_REPLACEMENT = "\ufffd"
"""Character that a decoder returns for bytes of an incomplete character."""
MIN_SHARED_TOKENS = 16
"""Minimum length of a shared prefix, since its KV cache must be copied."""


@dataclass(frozen=True)
class TokenQuery:
    """Request for the log-probability of a token; `position` is that of the token before it."""

    request: int
    position: int
    token: int


@dataclass(frozen=True)
class ScoredSequence:
    """Sequence of token ids with its queries in any order."""

    tokens: tuple[int, ...]
    queries: list[TokenQuery] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixNode:
    """Tokens that sequences share after those of the parent node.

    Attributes:
        start: Position of the first token.
        tokens: Token ids, at least one.
        queries: Queries at the positions of the node.
        children: Continuations, where sequences differ.
    """

    start: int
    tokens: tuple[int, ...]
    queries: list[TokenQuery]
    children: "list[PrefixNode]"


class InferenceModel:
    """Model of an engine for inference.

    All ranks call each method with the same arguments and get the same result. Sequences are
    sharded over data-parallel ranks.
    """

    def __init__(self, engine: Engine, max_batch_tokens: int = MAX_BATCH_TOKENS) -> None:
        """Wrap an engine after `build`; each call uses its current weights."""
        self._engine, self._max_batch_tokens = engine, max_batch_tokens

    @property
    def parallel_state(self) -> ParallelState:
        """Ranks of the engine."""
        return self._engine.parallel_state

    def create_batch(self) -> DecodeBatch:
        """Return an empty batch of sequences that join and leave it at any time."""
        return DecodeBatch(self._engine)

    def score(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and True if it is the greedy one.

        Args:
            requests: Token ids of a context, at least one, and of its continuation.
        """
        rank, size, _ = self.parallel_state.data_shard
        sequences = _shard_sequences(_build_sequences(requests), rank, size)
        log_probs, is_greedy = np.zeros(len(requests)), np.ones(len(requests), np.bool)
        if sequences:
            roots = [(0, node) for node in build_prefix_tree(sequences)]
            self._score_nodes(self._engine.create_decode_state(), roots, log_probs, is_greedy)
        indices = {query.request for sequence in sequences for query in sequence.queries}
        local_scores = [[i, (float(log_probs[i]), bool(is_greedy[i]))] for i in sorted(indices)]
        scores = dict(self._gather_results(local_scores))
        return [tuple(scores.get(i, (0.0, True))) for i in range(len(requests))]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        is_finished: Callable[[list[int]], bool],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        sample_ids: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Return the generated token ids of each prompt, including the one that finished it.

        Args:
            prompts: Token ids, at least one each. Equal prompts are prefilled once.
            max_new_tokens: Maximum number of generated tokens.
            is_finished: Return True if a sequence with these generated tokens is complete.
            temperature: Divisor of the logits; 0: greedy decoding.
            top_p: Probability mass of nucleus sampling.
            seed: Seed of the random bits.
            sample_ids: Ids that select the random bits of each prompt; None: the index.
        """
        sample_ids = range(len(prompts)) if sample_ids is None else sample_ids
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), *prompts[i]))
        sizes = {i: len(prompts[i]) + max_new_tokens for i in order}
        shard = order[self.parallel_state.dp_rank :: self.parallel_state.dp_size]
        local_results = []
        for batch in _split_into_batches(shard, sizes, self._max_batch_tokens):
            bits = [derive_random_bits(seed, sample_ids[i], max_new_tokens) for i in batch]
            batch_prompts = [tuple(prompts[i]) for i in batch]
            ids = run_decoding_loop(
                self._engine, batch_prompts, np.stack(bits), is_finished, temperature, top_p
            )
            local_results += [[i, tokens] for i, tokens in zip(batch, ids, strict=True)]
        generated = dict(self._gather_results(local_results))
        return [generated[i] for i in range(len(prompts))]

    def _score_nodes(
        self,
        parent: DecodeState,
        nodes: list[tuple[int, PrefixNode]],
        log_probs: NDArray[np.float64],
        is_greedy: NDArray[np.bool],
    ) -> None:
        """Compute nodes and their children, each after the tokens of a row of `parent`."""
        sizes = {i: len(node.tokens) + node.start for i, (_, node) in enumerate(nodes)}
        order = sorted(sizes, key=lambda i: len(nodes[i][1].tokens))
        for indices in _split_into_batches(order, sizes, self._max_batch_tokens):
            batch = [nodes[i] for i in indices]
            tokens, lengths = pad_tokens([node.tokens for _, node in batch])
            # Sequences that share no prefix need no KV cache
            use_cache = any(node.start or node.children for _, node in batch)
            capacity = tokens.shape[1] if use_cache else 0
            state = parent.select(np.array([row for row, _ in batch]), capacity)
            state.append(tokens, lengths)
            _add_scores(state, [node for _, node in batch], log_probs, is_greedy)
            children = [(i, child) for i, (_, node) in enumerate(batch) for child in node.children]
            if children:
                self._score_nodes(state, children, log_probs, is_greedy)

    def _gather_results(self, local_results: list[Any]) -> list[Any]:
        """Return the results of all replicas on all ranks."""
        parallel = self.parallel_state
        group, world_group = parallel.model_parallel_group, parallel.world_group
        is_first = group is None or group.is_rank0
        gathered = world_group.gather_object(local_results if is_first else [])
        return [result for shard in broadcast_object(world_group, gathered) for result in shard]


def build_stop_check(
    tokenizer: "PromptTokenizer", stop_sequences: Sequence[str]
) -> Callable[[list[int]], bool]:
    """Return the `is_finished` of generation up to a stop sequence or the end of the document.

    A stop sequence may be the name of a special token.
    """
    # A token has at least one byte, except one that only spells a prepended space
    num_bytes = max((len(stop.encode()) for stop in stop_sequences), default=0)
    num_tail_tokens = num_bytes + 1 + _MAX_TRUNCATED_BYTES

    def is_finished(ids: list[int]) -> bool:
        if ids[-1] in tokenizer.end_token_ids:
            return True
        # The tail may start inside of a character, for which a byte-fallback decoder replaces all
        # bytes up to the next token that spells no byte
        for start in range(-num_tail_tokens, _MAX_TRUNCATED_BYTES - num_tail_tokens + 1):
            text = tokenizer.decode(ids[start:], skip_special_tokens=False)
            if any(stop in text for stop in stop_sequences):
                return True
            if _REPLACEMENT not in text:
                return False
        return False

    return is_finished


def _add_scores(
    state: DecodeState,
    nodes: list[PrefixNode],
    log_probs: NDArray[np.float64],
    is_greedy: NDArray[np.bool],
) -> None:
    """Accumulate the log-probabilities that the queries of appended nodes request."""
    queries = [
        (query.request, row, query.position - node.start, query.token)
        for row, node in enumerate(nodes)
        for query in node.queries
    ]
    if not queries:
        return
    requests, rows, positions, tokens = np.array(queries, np.int64).T
    token_log_probs, greedy_tokens = state.compute_log_probs(rows, positions, tokens)
    np.add.at(log_probs, requests, token_log_probs)
    np.logical_and.at(is_greedy, requests, greedy_tokens == tokens)


def _build_sequences(
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[ScoredSequence]:
    """Return the sorted unique sequences; raise ValueError if a context is empty."""
    sequences: dict[tuple[int, ...], ScoredSequence] = {}
    for request, (context, continuation) in enumerate(requests):
        if not len(context):
            raise ValueError(
                f"request {request} has no context, and the first token of a sequence has no "
                "probability; give the end-of-document token"
            )
        if not len(continuation):
            continue
        tokens = (*context, *continuation[:-1])
        first = len(context) - 1
        sequences.setdefault(tokens, ScoredSequence(tokens)).queries.extend(
            TokenQuery(request, first + i, token) for i, token in enumerate(continuation)
        )
    return [sequences[tokens] for tokens in sorted(sequences)]


def _shard_sequences(sequences: list[ScoredSequence], rank: int, size: int) -> list[ScoredSequence]:
    """Return this rank's consecutive sequences, balanced by the number of tokens."""
    if size == 1 or not sequences:
        return sequences
    ends = np.cumsum([len(sequence.tokens) for sequence in sequences])
    start, end = np.searchsorted(ends, [ends[-1] * rank / size, ends[-1] * (rank + 1) / size])
    return sequences[start : len(sequences) if rank == size - 1 else end]


def _split_into_batches(
    order: Sequence[int], sizes: dict[int, int], max_size: int
) -> Iterator[list[int]]:
    """Yield batches with length times largest size at most `max_size`."""
    batch: list[int] = []
    largest = 0
    for i in order:
        largest = max(largest, sizes[i])
        if batch and (len(batch) + 1) * largest > max_size:
            yield batch
            batch, largest = [], sizes[i]
        batch.append(i)
    if batch:
        yield batch


def build_prefix_tree(sequences: Sequence[ScoredSequence], start: int = 0) -> list[PrefixNode]:
    """Return the nodes of sorted unique sequences that share their first `start` tokens.

    The sequences of a task share contexts: the choices of a question, and the questions after the
    same few-shot examples. Each shared prefix is computed once.
    """
    nodes, first = [], 0
    while first < len(sequences):
        last, end = first, len(sequences[first].tokens)
        while last + 1 < len(sequences):
            common = _count_common_prefix(sequences[last].tokens, sequences[last + 1].tokens)
            if common - start < MIN_SHARED_TOKENS:
                break
            last, end = last + 1, min(end, common)
        group = sequences[first : last + 1]
        queries = [q for sequence in group for q in sequence.queries if start <= q.position < end]
        children = build_prefix_tree([s for s in group if len(s.tokens) > end], end)
        nodes.append(PrefixNode(start, group[0].tokens[start:end], queries, children))
        first = last + 1
    return nodes


def _count_common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)
