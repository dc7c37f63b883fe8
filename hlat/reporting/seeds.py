"""Runs that differ in nothing but their seed, as one: mean and spread of what came of them.

A difference between two settings means something only beside what another seed makes of one.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import mean, stdev

from hlat.reporting.comparison import differences
from hlat.reporting.record import Record
from hlat.reporting.summary import state
from hlat.reporting.wording import UNKNOWN, whole
from hlat.tracking.totals import totals

SEED = "run.seed"
_COLUMNS = {
    "Final loss": ("final_loss", 4),
    "Best loss": ("best_loss", 4),
    "Held-out bits per byte": ("heldout_bits_per_byte", 4),
    "Spikes": ("spikes", 1),
    "Tokens/s": ("median_tokens_per_second", 0),
    "MFU": ("median_mfu", 4),
    "Cost (USD)": ("cost_usd", 2),
}
"""What is told of each point: a total of its runs, and its decimals."""


def table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]] | None:
    """Return the names of the columns, and a row per point; None if no point has several seeds.

    A cell is the mean of the runs that finished, ± their standard deviation where they are more
    than one.
    """
    axes = differences(records)
    seeds = axes.pop(SEED, [])
    points: dict[tuple[str, ...], list[Record]] = {}
    for number, record in enumerate(records):
        points.setdefault(tuple(values[number] for values in axes.values()), []).append(record)
    if not seeds or len(points) == len(records):
        return None
    rows = [[*point, str(len(runs)), *_results(runs)] for point, runs in points.items()]
    return [*axes, "Seeds", *_COLUMNS, "States"], rows


def _results(runs: Sequence[Record]) -> list[str]:
    found = [totals(run.metrics, run.events) for run in runs if state(run) == "finish"]
    cells = [
        _spread([one[key] for one in found if key in one], decimals)
        for key, decimals in _COLUMNS.values()
    ]
    states = Counter(map(state, runs))
    return [*cells, ", ".join(f"{whole(count)} {word}" for word, count in states.items())]


def _spread(values: Sequence[float], decimals: int) -> str:
    """Mean ± standard deviation of a sample."""
    if not values:
        return UNKNOWN
    deviation = f" ± {stdev(values):,.{decimals}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{decimals}f}{deviation}"
