"""Comparison of each point of a study with its baseline, with correction, and verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from hlat.config.study import Direction, StudyConfig
from hlat.study.paired_test import PairedDifference, PointRuns, adjust_p_values, compare_paired
from hlat.study.power import compute_required_seeds

Point = tuple[tuple[str, str], ...]
"""Factors of a point with their values, as text."""


class Verdict(Enum):
    """Results of a comparison."""

    better = "better"
    """The point is better than the baseline."""
    worse = "worse"
    """The point is worse than the baseline."""
    equal = "equal"
    """The difference is smaller than the smallest one that matters."""
    undecided = "not decided"
    """The seeds support none of these."""


@dataclass(frozen=True)
class Comparison:
    """A point with its baseline.

    `p_value` is corrected for all comparisons of the study. `num_more_seeds` would detect
    `detectable`, or are the fewest that can decide if `detectable` is NaN; None: more than can be
    computed.
    """

    point: Point
    baseline: Point
    difference: PairedDifference
    p_value: float
    verdict: Verdict
    detectable: float = math.nan
    num_more_seeds: int | None = None

    @property
    def label(self) -> str:
        """Factors in which the point differs from its baseline, and the others in parentheses."""
        return format_point_pair(self.point, self.baseline)


def analyze_study(
    points: Mapping[Point, PointRuns], design: StudyConfig, num_planned: int = 0
) -> list[Comparison]:
    """Return the comparison of each point with its baseline.

    Points without a baseline among the points are omitted. `num_planned` is the number of seeds of
    a study that has not ended.
    """
    pairs = find_baselines(list(points), design.baseline)
    num_comparisons = max(1, len(pairs))
    seeds = {seed for runs in points.values() for seed in (*runs.values, *runs.diverged)}
    differences = [
        compare_paired(
            points[point],
            points[baseline],
            higher_is_better=design.direction is Direction.maximize,
            confidence=1 - design.alpha,
            num_planned=max(num_planned, len(seeds)) if design.stop_worse else None,
        )
        for point, baseline in pairs
    ]
    p_values = adjust_p_values([difference.p_value for difference in differences])
    return [
        _decide(Comparison(*pair, difference, p_value, Verdict.undecided), design, num_comparisons)
        for pair, difference, p_value in zip(pairs, differences, p_values, strict=True)
    ]


def find_baselines(
    points: Sequence[Point], baseline: Mapping[str, Any]
) -> list[tuple[Point, Point]]:
    """Return each point that differs from its baseline, with the baseline.

    `baseline` contains texts by factor; empty: the last factor has the value of the first point.
    """
    if not points:
        return []
    values = {key: str(value) for key, value in baseline.items()} or dict(points[0][-1:])
    pairs = [(point, tuple((key, values.get(key, own)) for key, own in point)) for point in points]
    return [(point, other) for point, other in pairs if point != other and other in points]


def format_point(point: Point) -> str:
    """Return the factors of a point as overrides."""
    return " ".join(f"{key.removesuffix('.name')}={value}" for key, value in point) or "all runs"


def format_point_pair(point: Point, baseline: Point) -> str:
    """Return what is compared with what, such as `lr=2 - lr=1 (beta2=0.9)`."""
    one, other, common = _format_sides(point, baseline)
    return f"{one} - {other}" + (f" ({common})" if common else "")


def format_answer(comparison: Comparison, design: StudyConfig) -> str:
    """Return the verdict as a sentence, without its numbers."""
    one, other, common = _format_sides(comparison.point, comparison.baseline)
    if comparison.verdict is Verdict.undecided:
        missing = _format_missing_seeds(comparison)
        sentence = f"the seeds do not decide between {one} and {other}: {missing}"
    elif comparison.verdict is Verdict.equal:
        margin = _format_number(design.smallest_difference or 0.0)
        sentence = f"{one} and {other} do not differ by {margin} or more"
    else:
        sentence = f"{one} is {comparison.verdict.value} than {other}"
    context = f"with {common}, " if common else ""
    return f"{context}{sentence}{_format_diverged(comparison.difference)}"


def _format_sides(point: Point, baseline: Point) -> tuple[str, str, str]:
    """Return the settings in which two points differ, of each one, and their common settings."""
    pairs = [*zip(point, baseline, strict=True)]
    changed = [(one, other) for one, other in pairs if one != other]
    common = tuple(one for one, other in pairs if one == other)
    ones, others = (format_point(tuple(side)) for side in zip(*changed, strict=True))
    return ones, others, format_point(common) if common else ""


def format_verdict(comparison: Comparison, design: StudyConfig) -> str:
    """Return the verdict in words, with what the seeds would need if they do not support one."""
    text = comparison.verdict.value
    if comparison.verdict is Verdict.equal:
        text = f"no difference of {_format_number(design.smallest_difference or 0.0)} or more"
    elif comparison.verdict is Verdict.undecided:
        text = f"not decided: {_format_missing_seeds(comparison)}"
    return f"{text}{_format_diverged(comparison.difference)}"


def _format_diverged(difference: PairedDifference) -> str:
    if not difference.num_diverged and not difference.num_baseline_diverged:
        return ""
    seeds = _format_seeds(difference.num_diverged)
    return f"; diverged with {seeds}, the baseline with {difference.num_baseline_diverged}"


def _format_missing_seeds(comparison: Comparison) -> str:
    if math.isnan(comparison.detectable):
        missing = comparison.num_more_seeds or 2 - comparison.difference.num_pairs
        return f"a test needs {_format_seeds(missing, 'more ')} with the baseline"
    difference = _format_number(comparison.detectable)
    if comparison.num_more_seeds is None:
        text = f"no feasible number of seeds would detect a difference of {difference}"
        error = comparison.difference.evaluation_error
        if error > comparison.detectable / 2:
            text += (
                f"; the standard error of the held-out text is {_format_number(error)}, hold out "
                "more documents"
            )
        return text
    seeds = _format_seeds(comparison.num_more_seeds, "more ")
    return f"{seeds} would detect a difference of {difference}"


def _decide(comparison: Comparison, design: StudyConfig, num_comparisons: int) -> Comparison:
    """Return a comparison with its verdict, and with the missing seeds if there is none."""
    difference, margin = comparison.difference, design.smallest_difference
    if comparison.p_value < design.alpha:
        return replace(comparison, verdict=_get_direction(difference, design))
    has_diverged = difference.num_diverged or difference.num_baseline_diverged
    is_within = margin is not None and -margin < difference.low and difference.high < margin
    if is_within and not has_diverged:
        return replace(comparison, verdict=Verdict.equal)
    # Holm's smallest level: enough whatever the other comparisons show
    alpha = design.alpha / num_comparisons
    if math.isnan(difference.std):
        return replace(comparison, num_more_seeds=_count_missing_ranks(difference, alpha))
    evaluation_error = float(np.nan_to_num(difference.evaluation_error))
    candidates = [abs(difference.mean)] if margin is None else [margin, abs(difference.mean)]
    for detectable in candidates:
        required = compute_required_seeds(
            detectable, difference.std, alpha, design.power, evaluation_error
        )
        if required is None or required > difference.num_pairs:
            break
    more = None if required is None else max(1, required - difference.num_pairs)
    return replace(comparison, detectable=detectable, num_more_seeds=more)


def _count_missing_ranks(difference: PairedDifference, alpha: float) -> int | None:
    """Return the seeds that a test by ranks needs at least; None without diverged runs."""
    num_diverged = difference.num_diverged + difference.num_baseline_diverged
    if not num_diverged:
        return None
    required = math.floor(1 - math.log2(alpha)) + 1  # the smallest p value is 2 ** (1 - seeds)
    return max(1, required - num_diverged - difference.num_pairs)


def _get_direction(difference: PairedDifference, design: StudyConfig) -> Verdict:
    """Return the better side; with diverged runs, the side that diverged more is worse."""
    more_diverged = difference.num_diverged - difference.num_baseline_diverged
    sign = more_diverged or (difference.mean if not math.isnan(difference.mean) else 0.0)
    if not more_diverged and design.direction is Direction.maximize:
        sign = -sign
    return Verdict.worse if sign > 0 else Verdict.better


def _format_seeds(count: int, adjective: str = "") -> str:
    return f"{count:,} {adjective}{'seed' if count == 1 else 'seeds'}"


def _format_number(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"
