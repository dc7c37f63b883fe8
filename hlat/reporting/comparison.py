"""Several runs beside each other: what was set differently, and what came of it.

What differs is read from the configurations, not from what somebody typed, so runs of a sweep and
runs that were started weeks apart compare alike.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.config.told import told
from hlat.reporting import interactive
from hlat.reporting.curves import Curve, heldout, metric
from hlat.reporting.figures import Panel, drawable
from hlat.reporting.page import document, still
from hlat.reporting.page import figures as page_figures
from hlat.reporting.record import Record, is_run, read
from hlat.reporting.summary import state
from hlat.reporting.wording import UNKNOWN, anything, exact, percent, whole
from hlat.tracking import sweep
from hlat.tracking.totals import totals

_OWN = ("run.name", "run.root")
"""Keys that differ between any two runs."""
_FIGURES = (
    ("loss", "Training loss", "nats per token"),
    ("grad_norm", "Gradient norm", "l2, before clipping"),
    ("param_norm", "Parameter norm", "l2, all weights"),
    ("learning_rate", "Learning rate", ""),
    ("tokens_per_second", "Throughput", "tokens per second"),
)
_RESULTS = (
    *("Step", "Final loss", "Best loss", "Held-out bits per byte", "Spikes"),
    *("Tokens/s, median", "MFU, median", "Cost (USD)", "Goodput", "State"),
)


def runs(folders: Sequence[Path]) -> list[Record]:
    """Read the run folders that are given, those of sweeps, and those that lie in other folders.

    Raises:
        ConfigError: A folder neither is nor holds a run folder.
    """
    found: list[Path] = []
    for folder in folders:
        inside = [folder] if is_run(folder) else [*filter(is_run, _inside(folder))]
        if not inside:
            raise ConfigError(f"{folder} is no run folder, and there is none in it")
        found += [one for one in inside if one not in found]
    return [read(folder) for folder in found]


def left_out(folders: Sequence[Path]) -> list[str]:
    """The points that sweeps left out, each with the reason."""
    return [line for folder in folders if sweep.is_sweep(folder) for line in sweep.left_out(folder)]


def _inside(folder: Path) -> list[Path]:
    """Where runs of a folder may be, in the order of a sweep's points."""
    return sweep.run_folders(folder) if sweep.is_sweep(folder) else sorted(folder.glob("*"))


def differences(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the keys in which the runs' configurations differ, with the value of each run.

    Of a group whose preset explains the rest, such as precision, only its name.
    """
    trees = [_settings(record) for record in records]
    keys = dict.fromkeys(key for tree in trees for key in tree if key not in _OWN)
    values = {key: [anything(tree.get(key)) for tree in trees] for key in keys}
    differing = {key: told_by for key, told_by in values.items() if len(set(told_by)) > 1}
    return {key: told for key, told in differing.items() if not _is_explained(key, differing)}


def _is_explained(key: str, values: dict[str, list[str]]) -> bool:
    """Whether the name of a key's group says its value in each run."""
    names = values.get(f"{key.partition('.')[0]}.name", values[key])
    return names is not values[key] and len({*zip(names, values[key], strict=True)}) == len(
        {*names}
    )


def table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns, and a row per run: what was set, and what came of it."""
    axes = differences(records)
    rows = [
        [record.name, *(values[i] for values in axes.values()), *_results(record)]
        for i, record in enumerate(records)
    ]
    return ["Run", *axes, *_RESULTS], rows


def panels(records: Sequence[Record]) -> list[Panel]:
    """The figures of all runs over each other, without those that would be empty."""
    found = [
        Panel(
            key,
            title,
            unit,
            [_named(metric(record, key), record) for record in records],
            smooth=key == "loss",
        )
        for key, title, unit in _FIGURES
    ]
    means = [_named(curve, record) for record in records for curve in heldout(record)[-1:]]
    found.insert(1, Panel("heldout", "Held-out text, mean", "bits per byte", means))
    return [panel for panel in found if any(map(drawable, panel.curves))]


def page(
    records: Sequence[Record],
    drawings: Sequence[tuple[Panel, str]],
    others: Sequence[tuple[str, str, str]] = (),
    over_seeds: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """The comparison as an HTML document that needs nothing but itself.

    Args:
        records: The runs.
        drawings: Their curves, each with its SVG element.
        others: Title, SVG element and caption of figures that are no curves.
        over_seeds: A table of them by point (hlat.reporting.seeds).
        left_out: Points of their sweep that cannot run.
    """
    results = _html(*table(records), "Runs", "What was set differently, and what came of it")
    if over_seeds:
        results += _html(*over_seeds, "Points", "Over seeds, mean ± standard deviation")
    if left_out:
        items = "".join(f"<li>{escape(line)}</li>\n" for line in left_out)
        results += f"<h2>Left out, as it cannot run</h2>\n<ul>\n{items}</ul>\n"
    figures = "".join(interactive.figure(panel, svg) for panel, svg in drawings)
    figures += "".join(still(*other) for other in others)
    drawn = page_figures(f'<div class="figures">\n{figures}</div>\n') if figures else ""
    return document("Comparison", f"{len(records)} runs", results + drawn)


def _html(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str, caption: str) -> str:
    """A table whose first column names its rows."""
    first, *others = heads
    head = "".join(f'<th scope="col" class="number">{escape(name)}</th>' for name in others)
    body = "".join(
        f'<tr><th scope="row" class="name">{escape(name)}</th>'
        + "".join(f'<td class="number">{escape(value)}</td>' for value in values)
        + "</tr>\n"
        for name, *values in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}">\n<table>\n'
        f"<caption>{caption}</caption>\n"
        f'<thead>\n<tr><th scope="col">{escape(first)}</th>{head}</tr>\n</thead>\n'
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def _results(record: Record) -> list[str]:
    found = totals(record.metrics, record.events)

    def get(key: str) -> float:
        return found.get(key, float("nan"))

    cost = f"{found['cost_usd']:.2f}" if "cost_usd" in found else UNKNOWN
    return [
        whole(get("step")),
        exact(get("final_loss")),
        exact(get("best_loss")),
        exact(get("heldout_bits_per_byte")),
        whole(get("spikes")),
        whole(get("median_tokens_per_second")),
        percent(100 * get("median_mfu")),
        cost,
        percent(100 * record.lifetime.goodput),
        state(record),
    ]


def _named(curve: Curve, record: Record) -> Curve:
    return replace(curve, label=record.name)


def _settings(record: Record) -> dict[str, Any]:
    """The run's settings by full key; none if its file cannot be read."""
    with suppress(ConfigError):
        return _flat(told(record.config))
    return {}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by full key."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves |= _flat(item, f"{prefix}.{key}".lstrip("."))
    return leaves
