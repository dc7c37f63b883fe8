"""Signs of instability of the runs of each point of a study."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from hlat.study.study_analysis import Point, format_point
from hlat.tracking.text_format import UNKNOWN, format_short

Reduce = Callable[[Sequence[float]], float]

STABILITY_CAPTION = "Signs of instability over all runs of a point, diverged ones included"
_COLUMNS: dict[str, tuple[str, Reduce]] = {
    "Gradient spikes": ("spikes", fmean),
    "Spike score of the loss": ("loss_spike_score", fmean),
    "Spike score of the gradient norm": ("grad_norm_spike_score", fmean),
    "Largest attention logit": ("max_attention_logit", max),
    "Largest output logit": ("max_output_logit", max),
    "log Z at the end": ("final_log_z", fmean),
    "Largest gradient / second moment": ("max_moment_ratio", max),
    "Second moments below eps": ("max_moment_underflow", max),
    "Update RMS / rate": ("median_update_rms", fmean),
    "Unchanged weights": ("mean_unchanged_weights", fmean),
}
"""Summary metric of a run and its reduction over the runs of a point, by header."""
_DIAGNOSTIC = "max_output_logit"
"""Summary metric that only runs with tracking.diagnostics have."""


def has_diagnostics(summaries: Mapping[Point, Sequence[Mapping[str, float]]]) -> bool:
    """Return True if a run has logged diagnostics."""
    return any(_DIAGNOSTIC in run for runs in summaries.values() for run in runs)


def build_stability_table(
    summaries: Mapping[Point, Sequence[Mapping[str, float]]],
) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each point; columns without a value are omitted.

    `summaries` are the summary metrics of the runs of each point.
    """
    values = {
        header: [
            _reduce([run[key] for run in runs if key in run], reduce) for runs in summaries.values()
        ]
        for header, (key, reduce) in _COLUMNS.items()
    }
    known = {header: column for header, column in values.items() if {*column} != {UNKNOWN}}
    rows = [
        [format_point(point), *(column[n] for column in known.values())]
        for n, point in enumerate(summaries)
    ]
    return ["Point", *known], rows


def _reduce(values: Sequence[float], reduce: Reduce) -> str:
    return format_short(reduce(values)) if values else UNKNOWN
