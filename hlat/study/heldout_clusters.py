"""Held-out text of the runs of a study: its contribution to the error of a difference.

Runs that evaluate the same text are paired by document: the documents that are hard for one run are
hard for the other, so the error of their difference is much smaller than that of each value.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.study.run_record import Row, RunRecord

HELDOUT_METRIC = "heldout_bits_per_byte"


def compute_influences(
    records: Sequence[RunRecord], metric: str
) -> list[NDArray[np.float64] | None]:
    """Return the influence of each group of documents on the metric of each run; None: unknown.

    The sum of the squared differences between the influences of two runs is the variance of the
    difference over samples of documents (the linearization of the ratio, Cochran 1977, section
    6.4). The influences of runs with different text are in different parts of the vectors.
    """
    prefix, _, source = metric.partition(".")
    rows = [_get_last_evaluation(record) if prefix == HELDOUT_METRIC else {} for record in records]
    found = [_compute_influence(row, source) for row in rows]
    offsets: dict[Any, int] = {}
    size = 0
    for row, influence in zip(rows, found, strict=True):
        if influence is not None and row.get("text") not in offsets:
            offsets[row.get("text")] = size
            size += len(influence)
    for i, (row, influence) in enumerate(zip(rows, found, strict=True)):
        if influence is not None:
            found[i] = np.zeros(size)
            start = offsets[row.get("text")]
            found[i][start : start + len(influence)] = influence  # type: ignore[index]
    return found


def find_text_problem(records: Sequence[RunRecord], metric: str) -> str:
    """Return a sentence if the runs did not all evaluate the same held-out text, else "".

    A run that has not ended has only evaluated a part of it, and is omitted.
    """
    if metric.partition(".")[0] != HELDOUT_METRIC:
        return ""
    names: dict[Any, list[str]] = {}
    for record in records:
        row = _get_last_evaluation(record)
        if row and ("clusters" in row or "text" not in row):
            names.setdefault(row.get("text"), []).append(record.name)
    if len(names) < 2:
        return ""
    if unknown := names.pop(None, []):
        return (
            f"{', '.join(unknown)}: evaluated by an earlier version, which counted the bytes of "
            "held-out text differently; train again, or do not compare these runs with the others"
        )
    groups = "; ".join(", ".join(group) for group in names.values())
    return (
        f"the runs were evaluated on different held-out text ({groups}), so their differences are "
        "also those of the text; use the same data, batch.sequence_length and "
        "evaluation.tokens_per_source, or evaluate all text"
    )


def _get_last_evaluation(record: RunRecord) -> Row:
    evaluations = record.evaluations
    return evaluations[max(evaluations)] if evaluations else {}


def _compute_influence(row: Row, source: str) -> NDArray[np.float64] | None:
    """Return the influence of each group of documents on the bits per byte of a run."""
    clusters = row.get("clusters")
    if not isinstance(clusters, Mapping) or (source and source not in clusters):
        return None
    names = [source] if source else sorted(clusters)
    try:
        parts = [_linearize(clusters[name]) / len(names) for name in names]
    except (KeyError, TypeError, ValueError):  # a row of another program
        return None
    influence = np.concatenate(parts) if parts else np.array([math.nan])
    return influence if np.isfinite(influence).all() else None


def _linearize(cluster: Mapping[str, Sequence[float]]) -> NDArray[np.float64]:
    """Return the scaled residuals of each group from the ratio of bits to bytes."""
    bits, num_bytes = (np.array(cluster[key], np.float64) for key in ("bits", "bytes"))
    count, total = len(bits), num_bytes.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        residuals = (bits - bits.sum() / total * num_bytes) / total
        scaled: NDArray[np.float64] = residuals * np.sqrt(np.float64(count) / (count - 1))
    return scaled
