"""Statistics over runs that differ only in their seed: mean and standard deviation of results."""

from collections import Counter
from collections.abc import Sequence
from statistics import mean, stdev

from hlat.report.run_comparison import find_config_differences
from hlat.report.run_record import RunRecord
from hlat.report.summary_tables import get_run_state
from hlat.report.text_format import UNKNOWN, format_count
from hlat.tracking.summary_metrics import compute_summary_metrics

SEED_KEY = "run.seed"
_COLUMNS = {
    "Final loss": ("final_loss", 4),
    "Best loss": ("best_loss", 4),
    "Held-out bits per byte": ("heldout_bits_per_byte", 4),
    "Spikes": ("spikes", 1),
    "Tokens/s": ("median_tokens_per_second", 0),
    "MFU": ("median_mfu", 4),
    "Cost (USD)": ("cost_usd", 2),
}
"""Summary metric and number of decimals of each column."""


def build_seed_table(records: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]] | None:
    """Return the headers, and a row per configuration; None if there is one run of each.

    A cell contains the mean and standard deviation over the finished runs.
    """
    axes = find_config_differences(records)
    seeds = axes.pop(SEED_KEY, [])
    points: dict[tuple[str, ...], list[RunRecord]] = {}
    for index, record in enumerate(records):
        points.setdefault(tuple(values[index] for values in axes.values()), []).append(record)
    if not seeds or len(points) == len(records):
        return None
    rows = [[*point, str(len(runs)), *_format_results(runs)] for point, runs in points.items()]
    return [*axes, "Seeds", *_COLUMNS, "States"], rows


def _format_results(runs: Sequence[RunRecord]) -> list[str]:
    states = [get_run_state(run) for run in runs]
    summaries = [
        compute_summary_metrics(run.metrics, run.events)
        for run, state in zip(runs, states, strict=True)
        if state == "finish"
    ]
    cells = [
        _format_mean_and_std([one[key] for one in summaries if key in one], decimals)
        for key, decimals in _COLUMNS.values()
    ]
    counts = (f"{format_count(count)} {state}" for state, count in Counter(states).items())
    return [*cells, ", ".join(counts)]


def _format_mean_and_std(values: Sequence[float], decimals: int) -> str:
    if not values:
        return UNKNOWN
    deviation = f" ± {stdev(values):,.{decimals}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{decimals}f}{deviation}"
