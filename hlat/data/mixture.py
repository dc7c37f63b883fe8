"""Which source a stream reads next, at which step of the run.

Weights are shares of tokens, not of documents, because documents of different sources differ in
length by orders of magnitude. Each stream keeps every source within one segment of its share at any
time, so the shares hold over any stretch of the run, not merely on average.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.phase import Phase
from hlat.phase import boundaries

_ROUNDING = 1e-3
"""Tokens by which a share of up to 10^12 tokens may be off in floating point."""


@dataclass(frozen=True)
class Stage:
    """A stretch of steps under one mixture; two are equal if they start and mix alike."""

    start: int
    """First step."""
    shares: tuple[tuple[str, float], ...]
    """Share of tokens by source, in alphabetical order; positive, with sum 1."""
    name: str = field(compare=False)

    def first_source(self, point: float) -> str:
        """The source at a point of [0, 1) on the line that the shares divide.

        No source is behind when a stage begins; streams at evenly spread points begin it with the
        right mixture.
        """
        end = 0.0
        for name, share in self.shares:
            end += share
            if point < end:
                return name
        return self.shares[-1][0]

    def next_source(self, tokens: Mapping[str, int], segment_tokens: int) -> str:
        """The source that is due first of those that are not ahead of their shares.

        A source is due when the fluid mixture would have given it another whole segment. This is
        the rule of worst-case-fair weighted queueing (Bennett & Zhang, INFOCOM 1996) and of
        apportionment (Tijdeman, The chairman assignment problem, 1980): no source is ever further
        than one segment from its share, on either side, however many sources there are. Of equals
        the first by name is read.

        Args:
            tokens: Tokens read from each source since the stage began.
            segment_tokens: Most tokens that are read from it at once.
        """
        if len(self.shares) == 1:
            return self.shares[0][0]
        total = sum(tokens[name] for name, _ in self.shares)
        waiting = [(name, w) for name, w in self.shares if tokens[name] <= w * total + _ROUNDING]
        name, _ = min(waiting, key=lambda item: (tokens[item[0]] + segment_tokens) / item[1])
        return name


@dataclass(frozen=True)
class Timeline:
    """The stages of a run in order; the last one has no end."""

    stages: tuple[Stage, ...]

    def at(self, step: int) -> Stage:
        """The stage of a step."""
        starts = [stage.start for stage in self.stages]
        return self.stages[bisect_right(starts, step) - 1]


def make_timeline(phase: Phase, data: Data, batch: Batch) -> Timeline:
    """Turn a timeline in tokens into stages in steps, each with the shares of its sources."""
    base = {name: source.weight for name, source in data.sources.items()}
    starts = boundaries(phase, batch)
    stages = [
        Stage(start, _shares(base if entry.weights is None else entry.weights), entry.name)
        for start, entry in zip(starts, phase.timeline, strict=True)
    ]
    return Timeline(tuple(stages))


def _shares(weights: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    total = math.fsum(weights.values())
    return tuple((name, weights[name] / total) for name in sorted(weights) if weights[name] > 0)
