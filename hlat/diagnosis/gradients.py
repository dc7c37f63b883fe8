"""Whether loss and gradients are those of the whole batch, each sequence counted once.

The gradient of a batch is the sum of those of its micro batches, and the reference knows each. So
of a gradient that is wrong it is told how often each micro batch of each data-parallel rank is in
it; and where no such sum explains it, along which axis it goes right when that axis is not there.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.diagnosis import precise, reference
from hlat.diagnosis.patient import Patient, Step, Whole, batch, lively
from hlat.diagnosis.shrink import alone, without
from hlat.diagnosis.verdict import Culprit, Outcome, judged, not_applicable
from hlat.engine.shards import kv_copies

_APART = 0.1
"""Difference of two counts above which they are not the same one, rounded."""
_SHOWN = 3

Exact = dict[str, NDArray[np.float64]]


def check_gradients(patient: Patient) -> list[Outcome]:
    """Loss and every gradient of a step, against the reference on the same weights."""
    config = patient.config
    weights, tokens = lively(config), batch(config)
    patient.fill(weights)
    step = patient.step(tokens)
    parts, loss = _parts(config, weights, tokens) if patient.leads else ([], 0.0)
    wrong = _judge(config, step, parts) if patient.leads else []
    axes = _axes(patient, patient.tell([one["name"] for one in wrong if one["axis"] is None]))
    if not patient.leads:
        return []
    for one in wrong:
        one["axis"] = one["axis"] or axes[one["name"]]
    return [
        _loss(config, step.numbers.loss, loss, wrong),
        _gradients(config, step, parts, wrong),
        _counts(config, wrong, "reduction", "dp"),
        _counts(config, wrong, "pipeline", "pp"),
        _norm(config, step),
    ]


def check_accumulation(patient: Patient) -> list[Outcome]:
    """The same batch in micro batches of one sequence gives the same step."""
    config = patient.config
    if not patient.rebuilds:
        return [not_applicable("accumulation", "engine=nxd builds one model a process")]
    replica = config.parallelism.tp * config.parallelism.pp
    dp = config.num_processes // replica
    own = 2 * max(2, config.num_micro_batches)
    sizes = replace(config.batch, global_batch_size=own * dp)
    whole = replace(config, batch=replace(sizes, micro_batch_size=2))
    parts = replace(config, batch=replace(sizes, micro_batch_size=1))
    tokens, weights, steps = batch(whole), lively(config), []
    for one in (whole, parts):
        with patient.other(one) as other:
            other.fill(weights)
            steps.append(other.step(tokens))
    if not patient.leads:
        return []
    tolerance = 2 * precise.of_gradients(config)
    gaps = {
        name: distance(steps[1].gradients[name], gradient)
        for name, gradient in steps[0].gradients.items()
    }
    bad = sorted((name for name, gap in gaps.items() if not gap <= tolerance), key=gaps.__getitem__)
    worst = max(gaps.values())
    return [
        judged(
            "accumulation",
            [Culprit(name, "accumulation") for name in reversed(bad)],
            f"{own} micro batches give the gradients of {own // 2} to {worst:.1e}",
            f"{own} micro batches do not give the gradients of {own // 2}: {_list(bad[::-1])} "
            f"off by {worst:.1e} (at most {tolerance:.1e})",
            largest=worst,
            tolerance=tolerance,
        )
    ]


def check_next_step(patient: Patient) -> list[Outcome]:
    """What the model reads after an update is what was updated, on every rank."""
    config = patient.config
    tokens = batch(config, 3)
    patient.fill(lively(config))
    patient.forget()
    patient.train(tokens, 2.0**-6)
    found = patient.train(tokens, 0.0)
    weights = patient.whole("weights")
    if not patient.leads:
        return []
    expected = reference.mean_loss(config.model, weights, tokens)
    norm = float(np.sqrt(sum(np.square(w.astype(np.float64)).sum() for w in weights.values())))
    tolerance = 2 * precise.of_loss(config)
    gap = abs(found.loss - expected) / expected
    assert found.param_norm is not None
    norm_gap = abs(found.param_norm - norm) / norm
    reads = Culprit("weights that the model reads", widest(config))
    wrong = [] if gap <= tolerance else [reads]
    if not norm_gap <= precise.of_norm(config):
        wrong.append(Culprit("param_norm", widest(config)))
    return [
        judged(
            "next step",
            wrong,
            f"the loss after an update is that of the updated weights to {gap:.1e}",
            f"after an update the loss is {found.loss:.5f}, of the updated weights "
            f"{expected:.5f}; their norm {found.param_norm:.5f}, in truth {norm:.5f}",
            loss_gap=gap,
            norm_gap=norm_gap,
            tolerance=tolerance,
        )
    ]


def _parts(config: Config, weights: Whole, tokens: NDArray[np.int32]) -> tuple[list[Exact], float]:
    """The exact gradients of each micro batch of each data-parallel rank, and the loss of all."""
    dp = config.num_processes // (config.parallelism.tp * config.parallelism.pp)
    counted = tokens.shape[0] * (tokens.shape[1] - 1)
    parts, total = [], 0.0
    for rank in range(dp):
        for rows in np.split(tokens[rank::dp], config.num_micro_batches):
            rows = np.ascontiguousarray(rows)
            loss, gradients = reference.gradients(config.model, weights, rows, counted)
            parts.append(gradients)
            total += loss
    return parts, total


def _judge(config: Config, step: Step, parts: list[Exact]) -> list[dict[str, Any]]:
    """What is known of each gradient that is wrong; an axis of None is still to be found."""
    tolerance, wrong = precise.of_gradients(config), []
    for name, found in step.gradients.items():
        own = [part[name] for part in parts]
        whole = np.sum(own, axis=0)
        gap = distance(found, whole)
        if gap <= tolerance:
            continue
        basis = np.stack([part.ravel() for part in own], axis=1)
        counts, *_ = np.linalg.lstsq(basis, np.nan_to_num(found.ravel().astype(np.float64)))
        explained = distance(found.ravel(), basis @ counts) <= tolerance * max(1, counts.max())
        axis = _axis_of_counts(config, counts) if explained else None
        told = counts.tolist() if explained else []
        wrong.append({"name": name, "gap": gap, "counts": told, "axis": axis})
    return sorted(wrong, key=lambda one: -one["gap"])


def _axis_of_counts(config: Config, counts: NDArray[Any]) -> str | None:
    """Along which axis sequences are counted wrongly; None: all of them alike."""
    table = counts.reshape(-1, config.num_micro_batches)
    if np.ptp(table.mean(1)) > _APART:
        return "dp"
    if np.ptp(table.mean(0)) > _APART:
        return "pp" if config.parallelism.pp > 1 else "accumulation"
    return None


def _axes(patient: Patient, names: list[str]) -> dict[str, str]:
    """For each wrong gradient the axis without which it is right; model: it never is."""
    if not names:
        return {}
    config, layout = patient.config, patient.config.parallelism
    if config.num_processes == 1:
        return dict.fromkeys(names, "model")
    several = [axis for axis in ("tp", "pp") if getattr(layout, axis) > 1]
    if not patient.rebuilds:
        return dict.fromkeys(names, "+".join([*several, "dp"]))
    found = {name: "model" for name in _wrong_names(patient, alone(config)) if name in names}
    for axis in several:
        without_it = _wrong_names(patient, without(config, axis))
        found |= {n: axis for n in names if n not in found and n not in without_it}
    found = {name: found.get(name, "dp") for name in names}
    if layout.sequence_parallel and "tp" in found.values():
        plain = replace(config, parallelism=replace(layout, sequence_parallel=False))
        still = _wrong_names(patient, plain)
        found |= {n: "sp" for n, axis in found.items() if axis == "tp" and n not in still}
    copied = kv_copies(config.model, layout.tp) > 1
    kv = {n for n, axis in found.items() if axis == "tp" and ("k_proj" in n or "v_proj" in n)}
    return found | (dict.fromkeys(kv, "kv") if copied else {})


def _wrong_names(patient: Patient, config: Config) -> set[str]:
    """Gradients that are wrong in another layout, known to all ranks."""
    weights, tokens = lively(config), batch(config)
    with patient.other(config) as other:
        other.fill(weights)
        step = other.step(tokens)
        names = []
        if other.leads:
            parts, _ = _parts(config, weights, tokens)
            names = [one["name"] for one in _judge(config, step, parts)]
        return set(other.tell(names))


def _loss(config: Config, found: float, expected: float, wrong: list[dict[str, Any]]) -> Outcome:
    gap, tolerance = abs(found - expected) / expected, precise.of_loss(config)
    axis = wrong[0]["axis"] if wrong else widest(config)
    return judged(
        "loss",
        [] if gap <= tolerance else [Culprit("loss", axis)],
        f"{found:.6f}, exactly {expected:.6f}",
        f"{found:.6f}, exactly {expected:.6f}: {found / expected:.4g} times it, {gap:.1e} off "
        f"(at most {tolerance:.1e})",
        loss=found,
        expected=expected,
        tolerance=tolerance,
    )


def _gradients(
    config: Config, step: Step, parts: list[Exact], wrong: list[dict[str, Any]]
) -> Outcome:
    tolerance = precise.of_gradients(config)
    gaps = [
        distance(found, np.sum([part[name] for part in parts], axis=0))
        for name, found in step.gradients.items()
    ]
    bad = "; ".join(_sentence(config, one) for one in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return judged(
        "gradients",
        [Culprit(one["name"], one["axis"]) for one in wrong],
        f"all {len(gaps)} are exact to {max(gaps):.1e} of their norm",
        f"{bad}{more} (at most {tolerance:.1e})",
        largest=max(gaps),
        tolerance=tolerance,
    )


def _counts(config: Config, wrong: list[dict[str, Any]], check: str, axis: str) -> Outcome:
    """What the gradients say of the ranks along an axis."""
    size = {"dp": config.parallelism.dp or 1, "pp": config.parallelism.pp}[axis]
    if size == 1:
        return not_applicable(check, f"parallelism.{axis} is 1")
    bad = [one for one in wrong if one["axis"] == axis]
    told = "; ".join(_sentence(config, one) for one in bad[:_SHOWN])
    good = {
        "dp": f"each sequence of {size} data-parallel ranks counts once",
        "pp": f"each of {config.num_micro_batches} micro batches passes {size} stages once",
    }
    return judged(check, [Culprit(one["name"], axis) for one in bad], good[axis], told)


def _sentence(config: Config, one: dict[str, Any]) -> str:
    told = f"{one['name']} is {one['gap']:.1e} of its norm off along {one['axis']}"
    if not one["counts"]:
        return told
    table = np.reshape(one["counts"], (-1, config.num_micro_batches))
    if one["axis"] == "dp" and np.ptp(table.mean(1)) > _APART:
        return f"{told}: sequences of data-parallel ranks count {_times(table.mean(1))}"
    if np.ptp(table.mean(0)) > _APART:
        return f"{told}: micro batches count {_times(table.mean(0))}"
    return f"{told}: every sequence counts {_times(table.mean(keepdims=True)[0])}"


def _times(counts: NDArray[Any]) -> str:
    """Such as 1, 0 times."""
    return ", ".join(f"{abs(count):.3g}" for count in counts.round(2)) + " times"


def _norm(config: Config, step: Step) -> Outcome:
    """The global norm is that of the gathered gradient, each element counted once."""
    squares = {
        name: float(np.square(gradient.astype(np.float64)).sum())
        for name, gradient in step.gradients.items()
    }
    found, expected = step.numbers.grad_norm, float(np.sqrt(sum(squares.values())))
    assert found is not None
    tolerance = precise.of_norm(config)
    gap = abs(found - expected) / expected
    blamed = Culprit("grad_norm", _counted_twice(config, squares, found))
    wrong = [] if gap <= tolerance else [blamed]
    return judged(
        "gradient norm",
        wrong,
        f"{found:.6g} is that of the gathered gradients to {gap:.1e}",
        f"{found:.6g}, of the gathered gradients {expected:.6g}: {gap:.1e} off (at most "
        f"{tolerance:.1e}) along {blamed.axis}: some are counted more than once, or "
        "not at all",
        grad_norm=found,
        expected=expected,
        tolerance=tolerance,
    )


def _counted_twice(config: Config, squares: dict[str, float], found: float) -> str:
    """The axis of which a count would explain the norm; else the one with the most ranks."""
    layout, total = config.parallelism, sum(squares.values())
    copies = kv_copies(config.model, layout.tp)
    norms = sum(square for name, square in squares.items() if "norm" in name)
    kv = sum(s for name, s in squares.items() if "k_proj" in name or "v_proj" in name)
    guesses = {
        "kv": total + (copies - 1) * kv,
        "tp": total + (layout.tp - 1) * norms,
        "dp": total * (layout.dp or 1),
        "pp": total * layout.pp,
    }
    near = [a for a, guess in guesses.items() if abs(guess / found**2 - 1) < 0.01 and guess > total]
    return near[0] if near else widest(config)


def widest(config: Config) -> str:
    """All axes along which there are several ranks; model: none."""
    layout = config.parallelism
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp or 1}
    return "+".join(axis for axis, size in sizes.items() if size > 1) or "model"


def distance(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """Of the difference's norm to the exact one's; of what is not finite, infinity."""
    gap = np.linalg.norm((found.astype(np.float64) - exact).ravel())
    norm = np.linalg.norm(exact.astype(np.float64).ravel())
    return float(gap / norm) if np.isfinite(gap) else float("inf")


def _list(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
