"""Curves of several runs in the same figures, and their bands over seeds.

Curves of runs with a generated name are labelled by the settings that differ.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hlat.figures.report_figure import METRIC_PANELS, Panel, has_values
from hlat.study.metric_curves import (
    Curve,
    build_band_curve,
    build_heldout_curves,
    build_metric_curve,
)
from hlat.study.run_comparison import find_config_differences, group_seeds
from hlat.study.run_record import RunRecord
from hlat.tracking.setting_labels import format_settings, is_generated_name

_MAX_LABEL_LENGTH = 48
"""Characters of a curve's label; longer settings are replaced by the name of the run."""


def build_comparison_panels(records: Sequence[RunRecord]) -> list[Panel]:
    """Return the panels with curves of all runs that have values.

    If runs differ in their seed only, a panel contains a band for each configuration, too.
    """
    labels, groups = label_runs(records), label_groups(records)

    def build_curves(build: Callable[[RunRecord], Curve | None]) -> list[Curve]:
        curves = [build(record) for record in records]
        known = {
            i: replace(curve, label=labels[i])
            for i, curve in enumerate(curves)
            if curve is not None
        }
        return _add_bands(known, groups) if groups else [*known.values()]

    def build_panel(key: str, title: str, unit: str) -> Panel:
        curves = build_curves(lambda record: build_metric_curve(record, key))
        return Panel(key, title, unit, curves, can_smooth=key == "loss")

    loss, *others = [build_panel(*panel) for panel in METRIC_PANELS]
    means = build_curves(lambda record: next(iter(build_heldout_curves(record)[-1:]), None))
    heldout = Panel("heldout", "Held-out text, mean", "bits per byte", means)
    throughput = build_panel("tokens_per_second", "Throughput", "tokens per second")
    panels = [loss, heldout, *others, throughput]
    return [panel for panel in panels if any(map(has_values, panel.curves))]


def label_groups(records: Sequence[RunRecord]) -> dict[str, list[int]]:
    """Return the indices of the runs in each group of `group_seeds` by a label."""
    axes = find_config_differences(records)
    axes.pop("run.seed", None)
    labels: dict[str, list[int]] = {}
    for number, (point, runs) in enumerate(group_seeds(records).items(), start=1):
        label = format_settings(dict(zip(axes, point, strict=True)))
        label = label if len(label) <= _MAX_LABEL_LENGTH else f"setting {number}"
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        labels[f"{label} ({seeds})" if label else seeds] = runs
    return labels


def label_runs(records: Sequence[RunRecord]) -> list[str]:
    """Return a unique label for each run: its name, if the user has chosen it.

    Otherwise the settings that differ, such as `lr=0.1, seed=2`, unless they are those of another
    run, or too long.
    """
    axes = find_config_differences(records)
    labels = [
        format_settings({key: values[i] for key, values in axes.items()})
        for i in range(len(records))
    ]
    counts = Counter(labels)
    return [
        label
        if is_generated_name(record.name)
        and counts[label] == 1
        and 0 < len(label) <= _MAX_LABEL_LENGTH
        else record.name
        for label, record in zip(labels, records, strict=True)
    ]


def _add_bands(curves: Mapping[int, Curve], groups: Mapping[str, list[int]]) -> list[Curve]:
    """Return the curves of runs by index, and a band for each group of them."""
    runs, bands = [], []
    for group, (label, indices) in enumerate(groups.items()):
        members = [curves[i] for i in indices if i in curves]
        runs += [
            replace(curve, kind="run", style=(group, seed)) for seed, curve in enumerate(members)
        ]
        if known := [curve for curve in members if has_values(curve)]:
            band = build_band_curve(label, known)
            bands.append(replace(band, style=(group, group)))
    return [*runs, *bands]
