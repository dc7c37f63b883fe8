"""The mixture of sources over the steps of a run, and the scheduler that picks the next source.

Weights are proportions of tokens instead of documents, because document lengths differ between
sources by orders of magnitude. Each stream deviates from the proportions by at most one segment at
any time, so they apply to every interval of a run and not only on average.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig
from hlat.config.phase import PhaseConfig
from hlat.config.phase_steps import compute_stage_starts

_TOLERANCE_TOKENS = 1e-3
"""Rounding error, in tokens, of a proportion of up to 10^12 tokens in floating point."""


@dataclass(frozen=True)
class MixtureStage:
    """Consecutive steps with one mixture; equal to a stage of equal start and proportions."""

    start_step: int
    """First step."""
    proportions: tuple[tuple[str, float], ...]
    """Proportion of tokens by source, in alphabetical order; positive, with sum 1."""
    name: str = field(compare=False)

    @cached_property
    def only_source(self) -> str | None:
        """Name of the source of a stage with one source; None with several."""
        return self.proportions[0][0] if len(self.proportions) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as they are saved in checkpoints."""
        return {"name": self.name, "start": self.start_step, "shares": dict(self.proportions)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "MixtureStage":
        """Return the stage that `to_json` serialized."""
        return cls(fields["start"], tuple(sorted(fields["shares"].items())), fields["name"])

    def select_first_source(self, fraction: float) -> str:
        """Return the source at a point of [0, 1) of the cumulative proportions.

        Streams at evenly spaced points start a stage with the right mixture.
        """
        end = 0.0
        for name, proportion in self.proportions:
            end += proportion
            if fraction < end:
                return name
        return self.proportions[-1][0]

    def select_next_source(self, tokens: Mapping[str, int], segment_tokens: int) -> str:
        """Return the source with the earliest deadline among those at or below their proportion.

        The deadline of a source is the time at which the exact mixture completes another segment of
        it. This is worst-case-fair weighted queueing (Bennett & Zhang, INFOCOM 1996) and an
        apportionment rule (Tijdeman, The chairman assignment problem, 1980): every source stays
        within one segment of its proportion for any number of sources. Ties go to the first name.
        `tokens` has the tokens read from each source since the stage started, and a segment has at
        most `segment_tokens`.
        """
        if self.only_source is not None:
            return self.only_source
        total = sum(tokens[name] for name, _ in self.proportions)
        eligible = [
            (name, p)
            for name, p in self.proportions
            if tokens[name] <= p * total + _TOLERANCE_TOKENS
        ]
        name, _ = min(eligible, key=lambda item: (tokens[item[0]] + segment_tokens) / item[1])
        return name


@dataclass(frozen=True)
class MixtureSchedule:
    """The stages of a run in order; the last one has no end."""

    stages: tuple[MixtureStage, ...]

    def get_stage(self, step: int) -> MixtureStage:
        """Return the stage of a step."""
        starts = [stage.start_step for stage in self.stages]
        return self.stages[bisect_right(starts, step) - 1]


def build_mixture_schedule(
    phase: PhaseConfig, data: DataConfig, batch: BatchConfig
) -> MixtureSchedule:
    """Convert the timeline of a phase from tokens to steps, with the proportions of each stage."""
    base = {name: source.weight for name, source in data.sources.items()}
    stages = []
    for start, entry in zip(compute_stage_starts(phase, batch), phase.timeline, strict=True):
        weights = base if entry.weights is None else entry.weights
        total = math.fsum(weights.values())
        shares = tuple((name, w / total) for name, w in sorted(weights.items()) if w > 0)
        stages.append(MixtureStage(start, shares, entry.name))
    return MixtureSchedule(tuple(stages))
