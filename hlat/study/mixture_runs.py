"""Mixtures and held-out losses of finished runs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.study.mixture_points import MixturePoints, normalize_weights
from hlat.study.power_law import Array
from hlat.study.run_record import RunRecord, get_number, load_run_record
from hlat.study.run_row import get_value_order
from hlat.study.scaling_runs import load_finished_runs
from hlat.tracking.text_format import format_setting

HELDOUT_PREFIX = "heldout_bits_per_byte."
"""Prefix of the columns with the held-out loss of a source."""
_COMPARED = (
    *("model.", "batch.", "optimizer.", "schedule.", "data.", "precision.", "run.steps"),
    "evaluation.tokens_per_source",
)
"""Prefixes of the settings that all runs share."""
_IGNORED = ("data.workers", "data.prefetch", "data.root", "data.encoder")
_MAX_SHOWN = 3


def load_run_mixtures(
    directories: Sequence[Path], where: str | None = None
) -> tuple[MixturePoints, list[str]]:
    """Return the mixtures of the finished runs below directories, and which runs are omitted.

    The base has the weights of data.sources. The tokens of an epoch are those of study.mixture, or
    else of the ledgers.

    Args:
        directories: Run directories, or roots of runs.
        where: Filter of `hlat runs`.

    Raises:
        ConfigError: There is no finished run, the runs differ in other settings than the mixture,
            or a run lacks a held-out loss or has more than two stages.
    """
    loaded = [load_finished_runs(directory, where) for directory in directories]
    by_path = {
        str(runs.root / row["run"]): (row, settings)
        for runs, _ in loaded
        for row, settings in zip(runs.rows, runs.settings, strict=True)
    }
    location = ", ".join(map(str, directories))
    if not by_path:
        condition = "" if where is None else f" with {where}"
        raise ConfigError(
            f"{location} has no finished runs{condition}; `hlat runs` lists the states"
        )
    rows, settings = zip(*by_path.values(), strict=True)
    raise_config_errors(_find_differences(settings))
    base = _read_base(settings[0])
    mixtures, starts = _read_mixtures(by_path, base)
    domains = _list_domains(rows)
    num_unfinished = sum(num for _, num in loaded)
    notes = [f"omitted {num_unfinished:,} runs that have not finished"] if num_unfinished else []
    points = MixturePoints(
        location=location,
        names=[*by_path],
        sources=[*base],
        domains=[domain.removeprefix(HELDOUT_PREFIX) for domain in domains],
        weights=normalize_weights(mixtures),
        starts=starts,
        losses=_read_losses(by_path, domains),
        base=normalize_weights(np.array([*base.values()])),
        tokens=max(get_number(row, "tokens") for row in rows),
        tokens_per_epoch=_find_epochs(settings[0], map(Path, by_path), [*base]),
    )
    return points, notes


def _find_differences(settings: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a problem if the runs differ in settings other than mixture and seeds."""
    keys = {key for each in settings for key in each if key.startswith(_COMPARED)}
    differing = []
    for key in sorted(keys - {*_IGNORED}):
        values = {format_setting(each.get(key)) for each in settings}
        if len(values) > 1:
            shown = sorted(values, key=get_value_order)[:_MAX_SHOWN]
            differing.append(f"{key} ({', '.join(shown)})")
    if differing:
        yield (
            f"the runs differ in {', '.join(differing[:_MAX_SHOWN])}; a regression on mixtures "
            "needs equal other settings: select runs with where="
        )


def _read_base(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of data.sources by source."""
    prefix, suffix = "data.sources.", ".weight"
    return {
        key[len(prefix) : -len(suffix)]: get_number(dict(settings), key)
        for key in settings
        if key.startswith(prefix) and key.endswith(suffix)
    }


def _read_mixtures(
    by_path: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]], base: Mapping[str, float]
) -> tuple[Array, Array]:
    """Return the weights of the last stage [runs, sources], and its start [runs].

    In a study of last phases, runs with the base weights only have the start 1.
    """
    pairs = [_read_mixture(path, *run, base) for path, run in by_path.items()]
    weights = [mixture or [*base.values()] for mixture, _ in pairs]
    starts = np.array([start for _, start in pairs])
    if starts.any():
        starts[[mixture is None for mixture, _ in pairs]] = 1.0
    return np.array(weights), starts


def _read_mixture(
    path: str, row: Mapping[str, Any], settings: Mapping[str, Any], base: Mapping[str, float]
) -> tuple[list[float] | None, float]:
    """Return the weights of the last stage of a run in the order of the base, and its start.

    The weights are None if they are those of the base.
    """
    timeline = settings.get("phase.timeline")
    stages = timeline if isinstance(timeline, list) else []
    if not 1 <= len(stages) <= 2 or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError(
            f"{path} has {len(stages)} stages, and a regression needs one mixture per run, or one "
            "after the base weights; omit it with where="
        )
    if len(stages) == 2 and (stages[0].get("weights") or base) != base:
        raise ConfigError(
            f"{path}: the first of two stages has weights of its own, and a regression needs those "
            "of data.sources; omit it with where="
        )
    weights = stages[-1].get("weights")
    tokens = stages[0].get("tokens") if len(stages) == 2 else 0
    start = float(tokens or 0) / get_number(dict(row), "tokens")
    if weights is None or not start < 1:  # the run ends before the last stage
        return None, 0.0
    return [float(weights.get(name, 0)) for name in base], start


def _list_domains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    domains = {key for row in rows for key in row if key.startswith(HELDOUT_PREFIX)}
    if not domains:
        raise ConfigError(
            "no run has held-out bits per byte of sources; train with evaluation=heldout"
        )
    return sorted(domains)


def _read_losses(
    by_path: Mapping[str, tuple[Mapping[str, Any], Any]], domains: Sequence[str]
) -> Array:
    """Return the held-out losses [runs, domains]; raise ConfigError for a wrong one."""
    table = np.array(
        [[get_number(dict(row), domain) for domain in domains] for row, _ in by_path.values()]
    )
    for path, losses in zip(by_path, table, strict=True):
        for domain, value in zip(domains, losses, strict=True):
            if not 0 < value < np.inf:
                if domain not in by_path[path][0]:
                    raise ConfigError(
                        f"{path} has no {domain}, as other runs have; omit it with where="
                    )
                raise ConfigError(
                    f"{path}: {domain}={value:g} is not a number above 0; omit the run with where="
                )
    return table


def _find_epochs(
    settings: Mapping[str, Any], run_dirs: Iterable[Path], sources: Sequence[str]
) -> Array:
    """Return the tokens of one epoch of each source [sources]: stated ones, or of the ledgers."""
    stated = [
        get_number(dict(settings), f"study.mixture.tokens_per_epoch.{name}") for name in sources
    ]
    measured = _measure_epochs(map(load_run_record, run_dirs), sources)
    return np.where(np.isfinite(stated), stated, measured)


def _measure_epochs(records: Iterable[RunRecord], sources: Sequence[str]) -> Array:
    """Return the tokens of one epoch of each source [sources]; NaN without a ledger.

    The ledger counts finished documents. In runs much shorter than an epoch, these are the short
    ones, so that the result is too small.
    """
    sums = np.zeros((2, len(sources)))
    for record in records:
        for stage in record.data_ledger:
            for index, name in enumerate(sources):
                usage = stage["sources"].get(name, {})
                read = get_number(usage, "tokens"), get_number(usage, "epochs")
                sums[:, index] += np.nan_to_num(read)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(sums[1] > 0, sums[0] / sums[1], np.nan))
